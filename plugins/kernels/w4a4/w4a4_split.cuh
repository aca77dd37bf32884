// W4A4 GEMMs of few tiles: K in parts, so that every SM has work, and their sums added up in order.
#pragma once

#include "common/programmatic_launch.cuh"
#include "heuristics/w4a4.h"
#include "w4a4/w4a4_epilogue.cuh"

namespace trt_nvfp4 {

constexpr int kReduceThreads = 256;

template <TrtNvfp4DataType kDtype>
__global__ __launch_bounds__(kReduceThreads) void w4a4_reduce(W4A4Gemm gemm) {
    gemm.dtype = kDtype;
    int64_t const index = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
    if (index >= gemm.m * gemm.n) return;
    float sum = 0.0f;
    for (int split = 0; split < gemm.splits; ++split) sum += gemm.partials[split * gemm.m * gemm.n + index];
    float const value = finish(gemm, gemm_scale(gemm), sum, index / gemm.n, index % gemm.n);
    static_cast<uint16_t*>(gemm.out)[index] = static_cast<uint16_t>(to_pair(kDtype, value, 0.0f));
}

// Dense, in parts where that pays. `partials` holds split_elements(m, n).
inline TrtNvfp4Status launch_w4a4_dense(W4A4Kernels const& kernels, W4A4Gemm gemm, float* partials,
                                        cudaStream_t stream) {
    gemm.splits = kernels.partial == nullptr ? 1 : choose_splits(gemm.m, gemm.n, gemm.k, kernels.sm_count);
    if (gemm.splits == 1) return kernels.dense(gemm, stream);
    gemm.partials = partials;
    TRT_NVFP4_RETURN_IF_ERROR(kernels.partial(gemm, stream));
    auto* const reduce =
        gemm.dtype == TRT_NVFP4_FLOAT16 ? w4a4_reduce<TRT_NVFP4_FLOAT16> : w4a4_reduce<TRT_NVFP4_BFLOAT16>;
    int64_t const blocks = (gemm.m * gemm.n + kReduceThreads - 1) / kReduceThreads;
    return launch_kernel(reduce, static_cast<unsigned>(blocks), kReduceThreads, 0, false, stream, "w4a4_reduce", gemm);
}

}  // namespace trt_nvfp4
