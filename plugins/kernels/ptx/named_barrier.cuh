// Barriers of some of a block's threads.
#pragma once

namespace trt_nvfp4::ptx {

// Barrier of the block's first kThreads, whole warps, number 1: 0 is that of __syncthreads().
template <int kThreads>
__device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Barrier of kThreads threads, whole warps, with a number of their own.
template <int kThreads>
__device__ __forceinline__ void sync_warps_at(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same for warps that come from different places of a program: bar.sync, which is aligned, is one place.
template <int kThreads>
__device__ __forceinline__ void sync_roles_at(int barrier) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Arriving there without waiting for the others.
template <int kThreads>
__device__ __forceinline__ void arrive() {
    asm volatile("bar.arrive 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace trt_nvfp4::ptx
