// logits[t][e] = x[t] . w[e], in float32: a warp for each expert and kRouterTokens tokens.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

constexpr int kRouterThreads = 256;
constexpr int kRouterTokens = 4;

template <typename T>
__global__ __launch_bounds__(kRouterThreads) void generic_router(T const* x, T const* w, float* logits, int64_t m,
                                                                 int experts, int k) {
    int const lane = threadIdx.x % 32;
    int const expert = static_cast<int>(blockIdx.y) * (kRouterThreads / 32) + threadIdx.x / 32;
    int64_t const first = int64_t{blockIdx.x} * kRouterTokens;
    if (expert >= experts) return;
    T const* const row = w + int64_t{expert} * k;
    float sums[kRouterTokens] = {};
#pragma unroll 4
    for (int i = lane; i < k; i += 32) {
        float const weight = ptx::to_float(row[i]);
#pragma unroll
        for (int t = 0; t < kRouterTokens; ++t) {
            if (first + t < m) sums[t] = fmaf(ptx::to_float(x[(first + t) * k + i]), weight, sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < kRouterTokens; ++t) {
        float const sum = ptx::warp_sum(sums[t]);
        if (lane == 0 && first + t < m) logits[(first + t) * experts + expert] = sum;
    }
}

template <typename T>
TrtNvfp4Status launch_router(T const* x, T const* w, float* logits, int64_t m, int64_t experts, int64_t k,
                             cudaStream_t stream) {
    constexpr int kWarps = kRouterThreads / 32;
    dim3 const blocks(static_cast<unsigned>((m + kRouterTokens - 1) / kRouterTokens),
                      static_cast<unsigned>((experts + kWarps - 1) / kWarps));
    return launch_kernel(generic_router<T>, blocks, kRouterThreads, 0, false, stream, "generic_router", x, w, logits, m,
                         static_cast<int>(experts), static_cast<int>(k));
}

}  // namespace trt_nvfp4
