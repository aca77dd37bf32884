// Hand-over between blocks of one launch: what is written is counted, who reads it awaits the count.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"

namespace trt_nvfp4::sm90 {

// What all kThreads first threads of the block wrote can be read by who sees what f(), called by one of them, then
// counts. A fence of the GPU for each warp would take as long as all of them one after another.
template <int kThreads, typename F>
__device__ __forceinline__ void publish(F&& f) {
    ptx::sync_warps<kThreads>();
    if (threadIdx.x != 0) return;
    __threadfence();
    f();
}

__device__ __forceinline__ void count(uint32_t* counter, int times = 1) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(times) : "memory");
}

__device__ __forceinline__ uint32_t load_count(uint32_t const* counter) {
    uint32_t seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}

// Returns, to a warp, once there have been so many.
__device__ __forceinline__ void await_count(uint32_t const* counter, uint32_t target) {
    while (threadIdx.x % 32 == 0 && load_count(counter) < target) continue;
    __syncwarp();
}

// Which of a task's chunks of activations can be read. All lanes of a warp ask, because a trip to L2 for each would add
// up.
class ReadyChunks {
 public:
    // Once there have been `counts` of each.
    __device__ __forceinline__ ReadyChunks(uint32_t const* counters, uint32_t counts, int begin, int end)
        : counters_(counters), counts_(counts), next_(begin), end_(end) {}

    // Returns once chunk `chunk` can be read by the copy engine.
    __device__ __forceinline__ void await(int chunk) {
        if (chunk < next_) return;
        while (chunk >= next_) {
            int const mine = next_ + threadIdx.x % 32;
            bool const ready = mine < end_ && load_count(counters_ + mine) >= counts_;
            next_ += __clz(__brev(~__ballot_sync(0xffffffffu, ready)));  // ready ones from the first on
        }
        __syncwarp();
        ptx::fence_async_proxy_global();
    }

 private:
    uint32_t const* const counters_;
    uint32_t const counts_;
    int next_;
    int const end_;
};

}  // namespace trt_nvfp4::sm90
