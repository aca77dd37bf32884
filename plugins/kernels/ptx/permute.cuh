// Bytes of two words.
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

// Byte i is byte number selector[4 i .. 4 i + 2] of `low` and `high`, or, where bit 4 i + 3 is set, eight times that
// byte's sign. __byte_perm takes that bit for zero.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t permuted;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(permuted) : "r"(low), "r"(high), "r"(selector));
    return permuted;
}

}  // namespace trt_nvfp4::ptx
