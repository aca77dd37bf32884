// How blocks of one launch hand each other activations: the data is its own flag, so a value costs one trip to L2 where
// a barrier would cost three. Needs all blocks co-resident, or tasks in an order (sm90_w4a16_moe_tasks.cuh).
//
// Activations wait as kAbsent, a NaN that no conversion from float32 produces, until they are written; partial sums
// carry the phase they belong to. A memset of the workspace to 0xff before a launch, or the launch in front of it,
// makes everything absent: a killed launch leaves nothing behind that a later one could read.
//
// What this takes from hardware beyond the ISA: relaxed stores of the GPU's scope, relaxed loads and the copy engine's
// reads all meet in L2, which has one value of each word at a time. So a block that has seen a value and writes what
// depends on it need not fence in between for others to find the two in this order, and a copy by the copy engine, made
// anew until no value is absent, comes to see values that no proxy fence announced. Nothing is taken for granted of a
// store's words, which may land one after another.
#pragma once

#include <cstdint>

namespace trt_nvfp4::w4a16 {

constexpr int kAbsentByte = 0xff;

// Written in one piece.
struct __align__(8) Four {
    uint32_t pairs[2];
};

__device__ __forceinline__ void store_four(void* destination, Four four) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(destination), "r"(four.pairs[0]),
                 "r"(four.pairs[1])
                 : "memory");
}

// True if one of the two fours is absent: a written one has no pair of all ones.
__device__ __forceinline__ bool has_absent(uint4 eight) {
    return (eight.x == 0xffffffffu) | (eight.y == 0xffffffffu) | (eight.z == 0xffffffffu) | (eight.w == 0xffffffffu);
}

// The same where the halves of a word are stored one by one: a word may be half there.
__device__ __forceinline__ bool has_absent_value(uint4 eight) {
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

// Loads again those of kCount values that are absent until none is: all at once, since a trip to L2 for each would add
// up. load(i, wanted) does so if wanted.
template <int kCount, typename Absent, typename Load>
__device__ __forceinline__ void await_all(Absent&& is_absent, Load&& load) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            bool const absent = is_absent(i);
            missing |= absent;
            load(i, absent);
        }
    } while (missing);
}

// A partial sum and the phase it belongs to, written and read in one piece.
struct Partial {
    float value;
    int phase;
};

__device__ __forceinline__ void store_partial(Partial* destination, float value, int phase) {
    uint64_t const both = static_cast<uint64_t>(phase) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(destination), "l"(both) : "memory");
}

// Without a branch.
__device__ __forceinline__ void load_partial_if(bool wanted, Partial const* source, Partial& partial) {
    uint64_t both = static_cast<uint64_t>(partial.phase) << 32 | __float_as_uint(partial.value);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted ld.relaxed.gpu.global.u64 %0, [%1];\n"
        "}"
        : "+l"(both)
        : "l"(source), "r"(static_cast<uint32_t>(wanted))
        : "memory");
    partial = {__uint_as_float(static_cast<uint32_t>(both)), static_cast<int>(both >> 32)};
}

// The sum of `count` partial sums, `step` apart, in their order, once they have been written. kAtOnce make one trip to
// L2.
template <int kAtOnce>
__device__ __forceinline__ float add_partials(Partial const* first, int step, int count, int phase) {
    float sum = 0.0f;
#pragma unroll 1
    for (; count > 0; count -= kAtOnce, first += kAtOnce * step) {
        Partial partials[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            partials[i] = {0.0f, phase};
            load_partial_if(i < count, first + i * step, partials[i]);
        }
        await_all<kAtOnce>([&](int i) { return partials[i].phase != phase; },
                           [&](int i, bool wanted) { load_partial_if(wanted, first + i * step, partials[i]); });
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum += partials[i].value;
    }
    return sum;
}

// Orders this thread's earlier writes before its later ones, for every reader on the GPU.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace trt_nvfp4::w4a16
