// One block of 16 values to NVFP4, given its amax. Every step is IEEE round-to-nearest in the order of torchao's
// two-level path, so that codes match bit by bit.
#pragma once

#include "formats/scale_layout.cuh"
#include "ptx/e2m1.cuh"
#include "ptx/e4m3.cuh"

namespace trt_nvfp4 {

// The given tensor scale, or amax / (6 * 448) where that is 0; never subnormal.
__device__ __forceinline__ float resolve_tensor_scale(float given, uint32_t const* amax_bits) {
    if (given != 0.0f) return given;
    float const computed = __fdiv_rn(__uint_as_float(*amax_bits), 2688.0f);
    return computed < 0x1p-126f ? 0x1p-126f : computed;
}

struct BlockQuantizer {
    uint8_t block_scale;
    float inverse;

    __device__ __forceinline__ BlockQuantizer(uint32_t amax_bits, float tensor_scale) {
        block_scale = ptx::e4m3_encode(__fdiv_rn(__fdiv_rn(__uint_as_float(amax_bits), 6.0f), tensor_scale));
        float const scale = ptx::e4m3_decode_unsigned(block_scale);
        inverse = scale == 0.0f ? 0.0f : __fdiv_rn(__frcp_rn(tensor_scale), scale);
    }

    // Two codes, `low` in the low nibble.
    __device__ __forceinline__ uint32_t encode(float low, float high) const {
        return inverse == 0.0f ? 0u : ptx::e2m1_encode(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
    }

    __device__ __forceinline__ uint2 encode(float const (&values)[kBlock]) const {
        uint2 codes = make_uint2(0u, 0u);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            codes.x |= encode(values[i], values[i + 1]) << (4 * i);
            codes.y |= encode(values[8 + i], values[9 + i]) << (4 * i);
        }
        return codes;
    }
};

}  // namespace trt_nvfp4
