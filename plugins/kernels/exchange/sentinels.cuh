// Exchange between blocks of one launch by sentinels: the data is its own flag, so a value costs one trip to L2 where a
// barrier would cost three. Needs all blocks co-resident, or tasks in an order (sm90/moe/schedule.cuh). The other ways:
//
//     sentinels.cuh     values are a NaN, which no conversion from float32 produces, until they are written
//     tagged_words.cuh  a word holds a value and the layer or phase that it belongs to: nothing is erased
//     parity.cuh        a float's last bit says how often, modulo two, it has been written: half the bytes of a tag
//     counts.cuh        writers count, readers await the count: any data, at the price of a fence
//
// A memset of the workspace to 0xff before a launch, or the launch in front of it,
// makes everything a sentinel: a killed launch leaves nothing behind that a later one could read.
//
// What this takes from hardware beyond the ISA: relaxed stores of the GPU's scope, relaxed loads and the copy engine's
// reads all meet in L2, which has one value of each word at a time. So a block that has seen a value and writes what
// depends on it need not fence in between for others to find the two in this order, and a copy by the copy engine, made
// anew until no value is a sentinel, comes to see values that no proxy fence announced. Nothing is taken for granted of
// a store's words, which may land one after another.
#pragma once

#include <cstdint>

namespace trt_nvfp4::w4a16 {

constexpr int kSentinelByte = 0xff;

// Written in one piece.
struct __align__(8) Four {
    uint32_t pairs[2];
};

__device__ __forceinline__ void store_four(void* destination, Four four) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(destination), "r"(four.pairs[0]),
                 "r"(four.pairs[1])
                 : "memory");
}

// True if one of the two fours is a sentinel: a written one has no pair of all ones.
__device__ __forceinline__ bool has_sentinel(uint4 eight) {
    return (eight.x == 0xffffffffu) | (eight.y == 0xffffffffu) | (eight.z == 0xffffffffu) | (eight.w == 0xffffffffu);
}

// The same where the halves of a word are stored one by one: a word may be half there.
__device__ __forceinline__ bool has_sentinel_value(uint4 eight) {
    uint32_t const most = __vmaxu2(__vmaxu2(eight.x, eight.y), __vmaxu2(eight.z, eight.w));
    return most >> 16 == 0xffffu || (most & 0xffffu) == 0xffffu;
}

// To another SM, whole words at a time.
__device__ __forceinline__ void store_eight(void* destination, uint4 eight) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(eight.x), "r"(eight.y),
                 "r"(eight.z), "r"(eight.w)
                 : "memory");
}

__device__ __forceinline__ void store_word(void* destination, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(destination), "r"(word) : "memory");
}

// Past L1, never from a register.
__device__ __forceinline__ uint32_t load_word(void const* source) {
    uint32_t word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
    return word;
}
__device__ __forceinline__ uint4 load_eight(void const* source) {
    uint4 eight;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                 : "l"(source)
                 : "memory");
    return eight;
}

// Loads again those of kCount values that are sentinels until they are written: all at once, since a trip to L2 for
// each would add up. load(i, wanted) does so if wanted.
template <int kCount, typename Sentinel, typename Load>
__device__ __forceinline__ void await_all(Sentinel&& is_sentinel, Load&& load) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            bool const sentinel = is_sentinel(i);
            missing |= sentinel;
            load(i, sentinel);
        }
    } while (missing);
}

// Orders this thread's earlier writes before its later ones, for every reader on the GPU.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace trt_nvfp4::w4a16
