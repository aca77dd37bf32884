// One block of 16 values to NVFP4, given its amax. Every step is IEEE round-to-nearest in the order of torchao's
// two-level path, so that codes match bit by bit.
#pragma once

#include "formats/nvfp4_matrix.cuh"
#include "formats/scale_search.cuh"
#include "ptx/e2m1.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

// The given tensor scale, or amax / (6 * 448) where that is 0, or where block scales are searched, and may rise, amax /
// (6 * 256); never subnormal.
__device__ __forceinline__ float resolve_tensor_scale(float given, uint32_t const* amax_bits, int32_t scale_search) {
    if (given != 0.0f) return given;
    float const computed = __fdiv_rn(__uint_as_float(*amax_bits), scale_search == 0 ? 2688.0f : 1536.0f);
    return computed < 0x1p-126f ? 0x1p-126f : computed;
}

struct BlockQuantizer {
    uint8_t block_scale;
    float inverse;

    __device__ __forceinline__ BlockQuantizer(uint32_t amax_bits, float tensor_scale) {
        block_scale = ptx::e4m3_encode(__fdiv_rn(__fdiv_rn(__uint_as_float(amax_bits), 6.0f), tensor_scale));
        inverse = inverse_scale(ptx::e4m3_decode_unsigned(block_scale), tensor_scale);
    }

    // Moves on to the best scale; see ScaleCandidates.
    template <int kLanes, int kValues>
    __device__ __forceinline__ void search(ScaleCandidates const& candidates, float const* values) {
        int const best = candidates.best<kLanes, kValues>(values);
#pragma unroll
        for (int i = 0; i < ScaleCandidates::kMost; ++i) {
            if (i != best) continue;
            block_scale = static_cast<uint8_t>(candidates.codes[i]);
            inverse = candidates.inverses[i];
        }
    }

    // Two codes, `low` in the low nibble.
    __device__ __forceinline__ uint32_t encode(float low, float high) const {
        return inverse == 0.0f ? 0u : ptx::e2m1_encode(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
    }

    // What NVFP4 loses of a value.
    __device__ __forceinline__ float lost(float value, float tensor_scale) const {
        float const scale = ptx::e4m3_decode_unsigned(block_scale);
        float const seen = __fmul_rn(__fmul_rn(ptx::e2m1_decode(encode(value, 0.0f)), scale), tensor_scale);
        return __fsub_rn(value, seen);
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

// The quantizer of a whole block in one thread.
__device__ __forceinline__ BlockQuantizer block_quantizer(float const (&values)[kBlock], float tensor_scale,
                                                          int32_t scale_search) {
    uint32_t amax_bits = 0;
#pragma unroll
    for (float const value : values) amax_bits = max(amax_bits, ptx::magnitude_bits(value));
    BlockQuantizer quantizer(amax_bits, tensor_scale);
    if (scale_search != 0) {
        ScaleCandidates const candidates(amax_bits, tensor_scale, quantizer.block_scale, scale_search);
        quantizer.search<1, kBlock>(candidates, values);
    }
    return quantizer;
}

// The same of what NVFP4 loses of the block, which takes its place.
__device__ __forceinline__ BlockQuantizer residual_quantizer(float (&values)[kBlock], BlockQuantizer const& first,
                                                             float tensor_scale, int32_t scale_search) {
#pragma unroll
    for (float& value : values) value = first.lost(value, tensor_scale);
    return block_quantizer(values, tensor_scale, scale_search);
}

}  // namespace trt_nvfp4
