// The scale of a block of 16 values by the least squared error among a few candidates (number_formats.py says which).
// Errors are integers of 2^-9 E2M1 units, at most 1023, so that the sum of their squares is exact: neighbouring threads
// may share a block, and Torch and ONNX find the same bits in whatever order they add.
#pragma once

#include <cstdint>

#include "ptx/e4m3.cuh"

namespace trt_nvfp4 {

constexpr uint32_t kLargestScaleCode = 126;  // 448

__device__ __forceinline__ float inverse_scale(float block_scale, float tensor_scale) {
    return block_scale == 0.0f ? 0.0f : __fdiv_rn(__frcp_rn(tensor_scale), block_scale);
}

// The squared error of one value under `inverse`.
__device__ __forceinline__ float rounding_loss(float value, float inverse) {
    float const a = __fmul_rn(fabsf(value), inverse);
    // E2M1 has one fraction bit, steps of 0.5 at least and 6 as its largest value: float32 plus 1.5 * 2^22 times the
    // binade's power of two has no finer steps, and rounds ties to even.
    float const binade = __uint_as_float(__float_as_uint(fminf(fmaxf(a, 1.0f), 4.0f)) & 0x7f800000u);
    float const coarse = __fmul_rn(binade, 1.5f * 0x1p22f);
    float const rounded = fminf(__fsub_rn(__fadd_rn(a, coarse), coarse), 6.0f);
    float const error = fminf(fabsf(__fsub_rn(a, rounded)), 1023.0f / 512.0f);
    constexpr float kInteger = 1.5f * 0x1p23f;
    float const steps = __fsub_rn(__fmaf_rn(error, 512.0f, kInteger), kInteger);
    return __fmul_rn(steps, steps);
}

// The scales that a block may take: made first, for what divides calls a function, around which registers are few.
struct ScaleCandidates {
    static constexpr int kMost = 4;
    uint32_t codes[kMost];
    float inverses[kMost];
    int count;

    // `first`: the code of amax / 6. Zeros, NaN and what is beyond the range keep it.
    __device__ __forceinline__ ScaleCandidates(uint32_t amax_bits, float tensor_scale, uint32_t first,
                                               int32_t scale_search)
        : count(scale_search == 1 ? 2 : kMost) {
        bool const searched = first - 1 < kLargestScaleCode - 1;
        float const reciprocal = __frcp_rn(tensor_scale);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            int const offset = i < 2 ? -i : i + 2;
            codes[i] = searched ? min(max(static_cast<int>(first) + offset, 1), int{kLargestScaleCode}) : first;
        }
        if (searched && scale_search == 1) {
            codes[1] = ptx::e4m3_encode(__fdiv_rn(__uint_as_float(amax_bits) * 0.25f, tensor_scale));
        }
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            float const scale = ptx::e4m3_decode_unsigned(codes[i]);
            inverses[i] = scale == 0.0f ? 0.0f : __fdiv_rn(reciprocal, scale);
        }
    }

    // The place of the best one. kLanes neighbouring threads hold kValues of the block each, and all threads of their
    // warps call.
    template <int kLanes, int kValues>
    __device__ __forceinline__ int best(float const* values) const {
        int found = 0;
        float least = __int_as_float(0x7f800000);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            if (i >= count) break;
            float const inverse = fminf(inverses[i], 3.402823466e38f);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kValues; ++j) sum += rounding_loss(values[j], inverse);
#pragma unroll
            for (int offset = 1; offset < kLanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            float const scale = ptx::e4m3_decode_unsigned(codes[i]);
            float const loss = __fmul_rn(sum, __fmul_rn(scale, scale));
            if (loss < least) {
                found = i;
                least = loss;
            }
        }
        return found;
    }
};

}  // namespace trt_nvfp4
