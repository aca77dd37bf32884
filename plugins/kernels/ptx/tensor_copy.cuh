// Copies of boxes of a tensor map by the copy engine (sm_90 on). Zeros where a box leaves the tensor; all of the box's
// bytes count on the barrier.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace trt_nvfp4::ptx {

// Brings a map, a kernel parameter, nearer.
__device__ __forceinline__ void prefetch(CUtensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// x is the innermost coordinate of the box's first element.
__device__ __forceinline__ void tensor_copy(uint32_t destination, CUtensorMap const& map, int x, int y,
                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tensor_copy(uint32_t destination, CUtensorMap const& map, int x, int y, int z,
                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(destination),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

}  // namespace trt_nvfp4::ptx
