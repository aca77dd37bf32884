// What blocks know of their cluster and of the launches before and after theirs (sm_90 on).
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// A barrier of all threads of the cluster that orders no memory accesses.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.aligned;" ::
            : "memory");
}

// The next launch of the stream may begin while this one still runs; to await_previous_launch() it is ahead.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns once the launch before has finished and its writes can be read. Every block must call it: else the launch
// after this one could run before the launch before.
__device__ __forceinline__ void await_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace trt_nvfp4::ptx
