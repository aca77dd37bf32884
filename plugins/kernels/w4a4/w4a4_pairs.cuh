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
    __device__ __forceinline__ int blocks(int64_t hidden) const {
        return static_cast<int>(padded_blocks(hidden + out.residual_channels));
    }

    template <typename T>
    __device__ __forceinline__ void store(PairInput<T> const& input, int64_t pair, int64_t row, int64_t block,
                                          float tensor_scale) const {
        int64_t const stored = input.hidden + out.residual_channels;
        uint8_t* const block_scale = out.block_scales + scale_offset(row, block, padded_blocks(stored));
        if (block >= stored / kBlock) {
            *block_scale = 0;
            return;
        }
        float values[kBlock];
        bool const is_residual = block >= input.hidden / kBlock;
        input.load(values, pair, is_residual ? block - out.residual_channels / kBlock : block);
        BlockQuantizer quantizer = block_quantizer(values, tensor_scale, out.scale_search);
        if (is_residual) quantizer = residual_quantizer(values, quantizer, tensor_scale, out.scale_search);
        *block_scale = quantizer.block_scale;
        *reinterpret_cast<uint2*>(out.packed + (row * stored + block * kBlock) / 2) = quantizer.encode(values);
    }
};

}  // namespace trt_nvfp4
