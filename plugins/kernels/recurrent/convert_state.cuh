// A state from one type to another.
#pragma once

#include <algorithm>

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"

namespace trt_nvfp4::recurrent {

template <typename From, typename To>
__global__ void convert_state(From const* from, To* to, int64_t elements) {
    wait_for_kernels_before();
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
         i += int64_t{gridDim.x} * blockDim.x) {
        to[i] = ptx::from_float<To>(ptx::to_float(from[i]));
    }
}

template <typename From, typename To>
TrtNvfp4Status launch_convert(From const* from, To* to, int64_t elements, cudaStream_t stream) {
    constexpr int kThreads = 256;
    auto const blocks = static_cast<unsigned>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 1 << 14));
    return launch_kernel(convert_state<From, To>, blocks, kThreads, 0, true, stream, "convert_state", from, to,
                         elements);
}

}  // namespace trt_nvfp4::recurrent
