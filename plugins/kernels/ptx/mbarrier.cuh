// Barriers in shared memory that count threads (sm_80 on) and bytes (sm_90 on), and the bulk copies that arrive on
// them.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"

namespace trt_nvfp4::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// One of the expected arrivals, once all earlier cp_async_16 of this thread are in shared memory.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers known to the cluster and to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives on the barrier at the same place in CTA `rank` of the cluster. Orders this thread's reads of shared memory
// before, nothing of what it wrote for other CTAs: that would cost a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Returns once the phase of `parity` is over.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// Orders this thread's writes to shared memory before the copy engine's writes there, or tensor cores' reads, that
// follow a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between what other threads have written to global memory and what the copy engine reads there.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// `bytes` (a multiple of 16) from global memory to the same place in every CTA of `mask`, each arriving on its own
// barrier.
__device__ __forceinline__ void bulk_copy_multicast(uint32_t destination, void const* source, int bytes,
                                                    uint32_t barrier, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "h"(mask)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t destination, void const* source, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

}  // namespace trt_nvfp4::ptx
