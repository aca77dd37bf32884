// Largest magnitude of a tensor, as the bits of a float32. Skipped where the tensor scale is given.
#pragma once

#include <algorithm>

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

constexpr int kAmaxThreads = 256;
constexpr int kAmaxMaxBlocks = 1024;

template <typename T>
__global__ __launch_bounds__(kAmaxThreads) void generic_amax(T const* x, int64_t count, float const* given_scale,
                                                             uint32_t* amax_bits) {
    if (*given_scale != 0.0f) return;
    uint32_t largest = 0;
    for (int64_t i = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x; i < count;
         i += int64_t{gridDim.x} * kAmaxThreads) {
        largest = max(largest, ptx::magnitude_bits(ptx::to_float(x[i])));
    }
    largest = ptx::warp_max(largest);
    // A maximum is the same in any order: this atomic keeps the result deterministic.
    if (threadIdx.x % 32 == 0) atomicMax(amax_bits, largest);
}

template <typename T>
TrtNvfp4Status launch_amax(T const* x, int64_t count, float const* given_scale, uint32_t* amax_bits,
                           cudaStream_t stream) {
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaMemsetAsync(amax_bits, 0, sizeof(uint32_t), stream), "clear amax"));
    if (count == 0) return TRT_NVFP4_SUCCESS;
    int64_t const blocks = std::min<int64_t>((count + kAmaxThreads - 1) / kAmaxThreads, kAmaxMaxBlocks);
    return launch_kernel(generic_amax<T>, static_cast<unsigned>(blocks), kAmaxThreads, 0, false, stream, "generic_amax",
                         x, count, given_scale, amax_bits);
}

}  // namespace trt_nvfp4
