// Rows of pairs (moe_pairs.cuh) in NVFP4.
#pragma once

#include "formats/nvfp4_matrix.cuh"
#include "formats/quantize_block.cuh"
#include "moe/moe_pairs.cuh"
#include "w4a4/w4a4_experts.h"

namespace trt_nvfp4 {

struct Nvfp4PairRows {
    static constexpr int tile_rows = kW4a4ExpertRows;
    float const* given_scale;
    Nvfp4Matrix out;

    __device__ __forceinline__ float scale() const {
        return resolve_tensor_scale(*given_scale, out.amax_bits, out.scale_search);
    }
    __device__ __forceinline__ void keep(float scale) const { *out.tensor_scale = scale; }
    __device__ __forceinline__ static int blocks(int64_t hidden) { return static_cast<int>(padded_blocks(hidden)); }

    template <typename T>
    __device__ __forceinline__ void store(PairInput<T> const& input, int64_t pair, int64_t row, int64_t block,
                                          float tensor_scale) const {
        uint8_t* const block_scale = out.block_scales + scale_offset(row, block, padded_blocks(input.hidden));
        if (block >= input.hidden / kBlock) {
            *block_scale = 0;
            return;
        }
        float values[kBlock];
        input.load(values, pair, block);
        uint32_t amax_bits = 0;
#pragma unroll
        for (float const value : values) amax_bits = max(amax_bits, ptx::magnitude_bits(value));
        BlockQuantizer quantizer(amax_bits, tensor_scale);
        if (out.scale_search != 0) {
            ScaleCandidates const candidates(amax_bits, tensor_scale, quantizer.block_scale, out.scale_search);
            quantizer.search<1, kBlock>(candidates, values);
        }
        *block_scale = quantizer.block_scale;
        *reinterpret_cast<uint2*>(out.packed + (row * input.hidden + block * kBlock) / 2) = quantizer.encode(values);
    }
};

}  // namespace trt_nvfp4
