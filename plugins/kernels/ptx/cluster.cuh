// Blocks of a cluster meet, and write to each other's shared memory (sm_90 on).
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace trt_nvfp4::ptx {

// The two halves of a barrier of all threads of the cluster, each of which then sees what all wrote before.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A value to where `place` is in block `rank`, which its barrier, where this block's `barrier` is, counts by its bytes.
__device__ __forceinline__ void send_to_block(float const* place, uint32_t barrier, int rank, float value) {
    asm volatile(
        "{\n"
        ".reg .b32 there, told;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 told, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [told];\n"
        "}" ::"r"(shared_address(place)),
        "r"(barrier), "r"(rank), "r"(__float_as_uint(value))
        : "memory");
}

}  // namespace trt_nvfp4::ptx
