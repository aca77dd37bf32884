// Values as FP16 ones: multiplied by a power of two, they keep all bits of what is within 2^-22 of the greatest.
// Products of weights with FP16 take fewer operations to decode than with BF16 (sm80_w4a16_decode.cuh), and sums in
// FP16 need values of a known size (sm80_w4a16_token.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

class HalfScale {
 public:
    static constexpr int kMostExponent = 14;

    // The greatest magnitude, as ptx::magnitude_bits has it, gets the exponent of 2^exponent; a power of two has no
    // exponent above 127.
    __device__ __forceinline__ explicit HalfScale(uint32_t greatest, int exponent = kMostExponent)
        : from_(max(static_cast<int>(greatest >> 23), kMostExponent)), to_(exponent) {}

    // Of eight values of T.
    template <typename T>
    __device__ __forceinline__ uint4 of(uint4 eight) const {
        T const* const values = reinterpret_cast<T const*>(&eight);
        uint32_t halves[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            __half2 const half =
                __floats2half2_rn(ptx::to_float(values[2 * i]) * scale(), ptx::to_float(values[2 * i + 1]) * scale());
            halves[i] = *reinterpret_cast<uint32_t const*>(&half);
        }
        return make_uint4(halves[0], halves[1], halves[2], halves[3]);
    }

    // Makes them right again.
    __device__ __forceinline__ float factor() const {
        return from_ == to_ ? 0x1p-127f : __uint_as_float(static_cast<uint32_t>(from_ - to_) << 23);
    }

 private:
    __device__ __forceinline__ float scale() const {
        return __uint_as_float(static_cast<uint32_t>(254 + to_ - from_) << 23);
    }

    int from_, to_;
};

// The greatest magnitude of eight values of T, as ptx::magnitude_bits has it.
template <typename T>
__device__ __forceinline__ uint32_t greatest_of(uint4 eight) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    auto const* const pairs = reinterpret_cast<Pair const*>(&eight);
    Pair const most =
        __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])), __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
    return max(ptx::magnitude_bits(ptx::to_float(most.x)), ptx::magnitude_bits(ptx::to_float(most.y)));
}

}  // namespace trt_nvfp4
