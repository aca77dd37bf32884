// Sums whose parts blocks of one launch hand each other: a part says itself whether it has been written, in its last
// bit, which is how often, modulo two, that has been. Beside a phase (Partial in tagged_words.cuh) this spares
// half of the bytes, and beside a count a fence.
#pragma once

#include <cstdint>

#include "exchange/sentinels.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kPartStep = 32;  // between two parts of a sum

static_assert(w4a16::kSentinelByte % 2 == 1);  // as the time before the first

__device__ __forceinline__ float with_parity(float part, uint32_t parity) {
    return __uint_as_float((__float_as_uint(part) & ~1u) | parity);
}
__device__ __forceinline__ bool has_parity(float2 parts, uint32_t parity) {
    return (((__float_as_uint(parts.x) ^ parity) | (__float_as_uint(parts.y) ^ parity)) & 1) == 0;
}

// With the bit an infinity would be no number.
__device__ __forceinline__ float without_parity(float part) { return __uint_as_float(__float_as_uint(part) & ~1u); }

// Past L1, never from a register; without a branch.
__device__ __forceinline__ void load_parts_if(bool wanted, float2 const* source, float2& parts) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %3, 0;\n"
        "@wanted ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n"
        "}"
        : "+f"(parts.x), "+f"(parts.y)
        : "l"(source), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

// For all blocks to read; each float in one piece.
__device__ __forceinline__ void store_parts(float2* destination, float first, float second, uint32_t parity) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(destination), "f"(with_parity(first, parity)),
                 "f"(with_parity(second, parity))
                 : "memory");
}

// Adds to a lane's sums `count` parts from `first` on, kPartStep apart, in their order, once they have been written,
// and as many from `step` further on for each other column.
template <int kAtOnce, int kColumns>
__device__ __forceinline__ void add_parts(float2 const* first, uint32_t step, int count, uint32_t parity,
                                          float (&sums)[2 * kColumns]) {
#pragma unroll 1
    for (; count > 0; count -= kAtOnce, first += kAtOnce * kPartStep) {
        // As many as make one trip to L2. Those that are not there have the parity, and are zero without it.
        float2 parts[kColumns][kAtOnce];
#pragma unroll
        for (int i = 0; i < kColumns * kAtOnce; ++i) {
            int const n = i / kAtOnce, j = i % kAtOnce;
            parts[n][j].x = parts[n][j].y = __uint_as_float(parity);
            load_parts_if(j < count, first + n * step + j * kPartStep, parts[n][j]);
        }
        w4a16::await_all<kColumns * kAtOnce>(
            [&](int i) { return !has_parity(parts[i / kAtOnce][i % kAtOnce], parity); },
            [&](int i, bool wanted) {
                int const n = i / kAtOnce, j = i % kAtOnce;
                load_parts_if(wanted, first + n * step + j * kPartStep, parts[n][j]);
            });
        __syncwarp();
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                sums[2 * n] += without_parity(parts[n][j].x);
                sums[2 * n + 1] += without_parity(parts[n][j].y);
            }
        }
    }
}

}  // namespace trt_nvfp4::sm90
