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

// What L2 does with what is read once: that gives way first.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Brings a box to L2; x is the innermost coordinate of its first element.
__device__ __forceinline__ void tensor_prefetch(CUtensorMap const& map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tensor_prefetch(CUtensorMap const& map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// x is the innermost coordinate of the box's first element; kOnce: its bytes are hardly read again.
template <bool kOnce>
__device__ __forceinline__ void tensor_copy(uint32_t destination, CUtensorMap const& map, int x, int y,
                                            uint32_t barrier) {
    if constexpr (kOnce) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
            "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(evict_first())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
            "l"(&map), "r"(x), "r"(y), "r"(barrier)
            : "memory");
    }
}

template <bool kOnce>
__device__ __forceinline__ void tensor_copy(uint32_t destination, CUtensorMap const& map, int x, int y, int z,
                                            uint32_t barrier) {
    if constexpr (kOnce) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
            "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
            "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
            : "memory");
    }
}

}  // namespace trt_nvfp4::ptx
