// Values as FP16 ones: multiplied by a power of two, they keep all bits of what is within 2^-22 of the greatest (2^-20
// where products are summed).
// Products of weights with FP16 take fewer operations to decode than with BF16 (sm80_w4a16_decode.cuh), and sums in
// FP16 need values of a known size (sm80_w4a16_token.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "w4a16/stream/sm80_w4a16_decode.cuh"

namespace trt_nvfp4 {

class HalfScale {
 public:
    static constexpr int kMostExponent = 14;

    // The greatest magnitude, as ptx::magnitude_bits has it, gets the exponent of 2^exponent; a power of two has no
    // exponent above 127.
    __device__ __forceinline__ explicit HalfScale(uint32_t greatest, int exponent = kMostExponent)
        : from_(max(static_cast<int>(greatest >> 23), kMostExponent)), to_(exponent) {}

    // The scale of eight values of T.
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

    // Exponent of the power of two that gives a BF16 value the exponent bits that it has as FP16.
    __device__ __forceinline__ int exponent() const { return to_ + 15 - from_; }

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

// The greatest magnitude of eight values of T, as ptx::magnitude_bits has it; NaN is greater than all.
template <typename T>
__device__ __forceinline__ uint32_t greatest_of(uint4 eight) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    auto const* const pairs = reinterpret_cast<Pair const*>(&eight);
    Pair const most = __hmax2_nan(__hmax2_nan(__habs2(pairs[0]), __habs2(pairs[1])),
                                  __hmax2_nan(__habs2(pairs[2]), __habs2(pairs[3])));
    return max(ptx::magnitude_bits(ptx::to_float(most.x)), ptx::magnitude_bits(ptx::to_float(most.y)));
}

// BF16 values as FP16.
template <int kEights>
__device__ __forceinline__ void to_half(HalfScale const& scale, uint4 (&eights)[kEights]) {
    constexpr int kPairs = 4 * kEights;
    auto* const pairs = reinterpret_cast<uint32_t*>(eights);
    // With this power exponents are those that FP16 has, subnormal values' too, and all that is left is a shift, by
    // the multiplier, whose pipe has less to do.
    uint32_t const power = static_cast<uint32_t>(scale.exponent() + 127) << 7;
    if (scale.exponent() > -127) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            uint32_t const small = w4a16::multiply<__nv_bfloat16>(pairs[i], power << 16 | power);
            pairs[i] = (small & 0x7fff7fffu) * 7u + small;  // times 8 but for the signs
        }
    } else {  // the power is below BF16's least
#pragma unroll
        for (uint4& eight : eights) eight = scale.of<__nv_bfloat16>(eight);
    }
}

// The same of a row, of which lanes that differ in bits `kBits` have the others. Returns their factor.
template <int... kBits, int kEights>
__device__ __forceinline__ float to_half(uint4 (&eights)[kEights]) {
    constexpr int kPairs = 4 * kEights;
    auto* const pairs = reinterpret_cast<uint32_t*>(eights);
    // Read as unsigned integers, negative values are the greatest, by magnitude; as signed ones, the others are.
    uint32_t greatest = 0, most = 0x80008000u;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        greatest = __vmaxu2(greatest, pairs[i]);
        most = __vmaxs2(most, pairs[i]);
    }
    greatest = __vmaxs2(greatest & 0x7fff7fffu, most);
    greatest = max(greatest << 16, greatest & 0xffff0000u);
    ((greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, kBits))), ...);
    HalfScale const scale(greatest);
    to_half(scale, eights);
    return scale.factor();
}

}  // namespace trt_nvfp4
