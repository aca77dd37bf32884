// r = T(x + residual); n = T(rmsnorm(r) * weight). One block per row.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

template <typename T>
struct RmsNormArgs {
    int64_t m, k;
    T const* x;
    T const* residual;  // null: none
    T const* weight;    // null: no norm
    float epsilon;
    T* r;  // null: not wanted
    T* n;  // written when weight is given
};

constexpr int kRmsNormThreads = 256;

template <typename T>
__global__ __launch_bounds__(kRmsNormThreads) void generic_rmsnorm(RmsNormArgs<T> args) {
    int64_t const row = int64_t{blockIdx.x} * args.k;
    auto const sum_with_residual = [&](int64_t i) {
        T const x = args.x[row + i];
        if (args.residual == nullptr) return x;
        return ptx::from_float<T>(ptx::to_float(x) + ptx::to_float(args.residual[row + i]));
    };

    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < args.k; i += kRmsNormThreads) {
        T const r = sum_with_residual(i);
        if (args.r != nullptr) args.r[row + i] = r;
        squares += ptx::to_float(r) * ptx::to_float(r);
    }
    if (args.weight == nullptr) return;

    float const mean = ptx::block_sum<kRmsNormThreads>(squares) / static_cast<float>(args.k);
    float const inverse_rms = __frcp_rn(__fsqrt_rn(mean + args.epsilon));
    for (int64_t i = threadIdx.x; i < args.k; i += kRmsNormThreads) {
        float const r = ptx::to_float(sum_with_residual(i));
        args.n[row + i] = ptx::from_float<T>(r * inverse_rms * ptx::to_float(args.weight[i]));
    }
}

template <typename T>
TrtNvfp4Status launch_rmsnorm(RmsNormArgs<T> const& args, cudaStream_t stream) {
    if (args.m == 0) return TRT_NVFP4_SUCCESS;
    return launch_kernel(generic_rmsnorm<T>, static_cast<unsigned>(args.m), kRmsNormThreads, 0, false, stream,
                         "generic_rmsnorm", args);
}

}  // namespace trt_nvfp4
