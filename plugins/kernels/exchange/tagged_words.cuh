// Exchange between blocks of one launch by tagged words: a value and what it belongs to, its layer or its phase, are
// written and read in one piece. Nothing is erased and no fence keeps an order (sentinels.cuh has the other ways).
#pragma once

#include <cstdint>

#include "exchange/sentinels.cuh"

namespace trt_nvfp4::w4a16 {

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

// The tag of a layer's values. A launch's workspace starts as all ones, which is not a layer's tag.
__device__ __forceinline__ uint32_t tag_of(int layer) { return static_cast<uint32_t>(layer % 0xffff); }

template <typename T>
__device__ __forceinline__ void store_tagged(uint32_t* destination, T value, int layer) {
    uint32_t const word = *reinterpret_cast<uint16_t const*>(&value) | tag_of(layer) << 16;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(destination), "r"(word) : "memory");
}

template <typename T>
__device__ __forceinline__ T load_tagged(uint32_t const* source, int layer) {
    uint32_t word;
    do {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
    } while (word >> 16 != tag_of(layer));
    uint16_t const bits = static_cast<uint16_t>(word);
    return *reinterpret_cast<T const*>(&bits);
}

struct TaggedEight {
    uint4 low, high;

    __device__ __forceinline__ void load(uint32_t const* source) {
        low = load_eight(source);
        high = load_eight(source + 4);
    }
    __device__ __forceinline__ bool is_of(int layer) const {
        uint32_t const tag = tag_of(layer) << 16;
        uint32_t const differing = (low.x ^ tag) | (low.y ^ tag) | (low.z ^ tag) | (low.w ^ tag) | (high.x ^ tag) |
                                   (high.y ^ tag) | (high.z ^ tag) | (high.w ^ tag);
        return differing >> 16 == 0;
    }
    __device__ __forceinline__ uint4 values() const {
        return make_uint4(__byte_perm(low.x, low.y, 0x5410), __byte_perm(low.z, low.w, 0x5410),
                          __byte_perm(high.x, high.y, 0x5410), __byte_perm(high.z, high.w, 0x5410));
    }
};

// Nanoseconds between two polls of a value: all blocks' polls at once hold up the values.
constexpr unsigned kPollPause = 100;

}  // namespace trt_nvfp4::w4a16
