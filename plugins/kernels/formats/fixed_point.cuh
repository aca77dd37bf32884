// One token's activations as 16-bit integers times a power of two, whose products with weights are summed exactly
// (sm90/common/product.cuh). The greatest keeps 15 bits.
#pragma once

#include "formats/half_scale.cuh"

namespace trt_nvfp4 {

class FixedPoint {
 public:
    // The greatest magnitude, as ptx::magnitude_bits has it.
    __device__ __forceinline__ explicit FixedPoint(uint32_t greatest)
        : from_(max(static_cast<int>(greatest >> 23), kExponent + 1)) {}

    // Eight values of T. No pair equals the sentinel (exchange/sentinels.cuh), as two times -1 would.
    template <typename T>
    __device__ __forceinline__ uint4 of(uint4 eight) const {
        constexpr float kRounds = 0x1.8p23f;  // to integers, which are then the sum's last bits
        float const scale = __uint_as_float(static_cast<uint32_t>(254 + kExponent - from_) << 23);
        T const* const values = reinterpret_cast<T const*>(&eight);
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t const low = __float_as_uint(fmaf(ptx::to_float(values[2 * i]), scale, kRounds));
            uint32_t const high = __float_as_uint(fmaf(ptx::to_float(values[2 * i + 1]), scale, kRounds));
            pairs[i] = min(__byte_perm(low, high, 0x5410), 0xfffffffeu);
        }
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    // Undoes the scaling; NaN if one of the values is NaN or infinite.
    __device__ __forceinline__ float factor() const {
        return __uint_as_float(from_ == 255 ? 0x7fffffffu : static_cast<uint32_t>(from_ - kExponent) << 23);
    }

 private:
    static constexpr int kExponent = 14;  // of the greatest

    int from_;
};

// Values of one token, of which lanes that differ in bits `kBits` have the others. Returns their factor.
template <typename T, int... kBits, int kEights>
__device__ __forceinline__ float to_fixed_point(uint4 (&eights)[kEights]) {
    uint32_t greatest = 0;
#pragma unroll
    for (uint4 const& eight : eights) greatest = max(greatest, greatest_of<T>(eight));
    ((greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, kBits))), ...);
    FixedPoint const fixed(greatest);
#pragma unroll
    for (uint4& eight : eights) eight = fixed.of<T>(eight);
    return fixed.factor();
}

}  // namespace trt_nvfp4
