// Prefetching.
#pragma once

namespace trt_nvfp4::ptx {

// A line to L2.
__device__ __forceinline__ void prefetch(void const* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace trt_nvfp4::ptx
