// BF16 values as FP16 ones: multiplied by a power of two, they keep all bits of what is within 2^-24 of the greatest.
// Products of weights with FP16 take fewer operations to decode (sm80_w4a16_decode.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

class HalfScale {
 public:
    // The greatest magnitude, as ptx::magnitude_bits has it, gets the exponent of 2^14; a power of two has no exponent
    // above 127.
    __device__ __forceinline__ explicit HalfScale(uint32_t greatest)
        : exponent_(max(static_cast<int>(greatest >> 23), 14)) {}

    // Of eight BF16 values.
    __device__ __forceinline__ uint4 of(uint4 eight) const {
        auto const* const pairs = reinterpret_cast<__nv_bfloat162 const*>(&eight);
        uint32_t halves[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 const both = __bfloat1622float2(pairs[i]);
            __half2 const half = __floats2half2_rn(both.x * scale(), both.y * scale());
            halves[i] = *reinterpret_cast<uint32_t const*>(&half);
        }
        return make_uint4(halves[0], halves[1], halves[2], halves[3]);
    }

    // Makes them right again.
    __device__ __forceinline__ float factor() const {
        return exponent_ == 14 ? 0x1p-127f : __uint_as_float(static_cast<uint32_t>(exponent_ - 14) << 23);
    }

 private:
    __device__ __forceinline__ float scale() const {
        return __uint_as_float(static_cast<uint32_t>(268 - exponent_) << 23);
    }

    int exponent_;
};

// The greatest magnitude of eight BF16 values, as ptx::magnitude_bits has it.
__device__ __forceinline__ uint32_t greatest_of(uint4 eight) {
    auto const* const pairs = reinterpret_cast<__nv_bfloat162 const*>(&eight);
    __nv_bfloat162 const most =
        __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])), __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
    uint32_t const bits = *reinterpret_cast<uint32_t const*>(&most);
    return max(bits << 16, bits & 0xffff0000u);
}

}  // namespace trt_nvfp4
