// Reductions in a fixed order, so that a result never depends on the schedule.
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Sum over a block of kThreads; every thread gets it.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, one warp's worth of partial sums");
    __shared__ float partial[kThreads / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < kThreads / 32; ++i) total += partial[i];
    return total;
}

// The bits of |x| order as unsigned integers, and a NaN's lie above infinity's: a maximum over them keeps NaN.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

}  // namespace trt_nvfp4::ptx
