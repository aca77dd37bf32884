// What happens to the accumulators of a W4A4 GEMM: scales and bias, then the activation or the gate, then T or NVFP4.
// Straight from registers to global memory. kLanes neighbouring threads share 32 columns of a row: thread `lane` of a
// quad holds columns 8 i + 2 lane and the next (mma.sync's fragment); with one lane it holds all 32 (tensor memory's).
#pragma once

#include "common/activation.cuh"
#include "formats/quantize_block.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "w4a4/w4a4_gemm.h"

namespace trt_nvfp4 {

constexpr int kColumns = 32;

template <int kLanes>
using Fragment = float[kColumns / kLanes];

// The column, from column0 on, of a fragment's element i.
template <int kLanes>
__device__ __forceinline__ constexpr int fragment_column(int i, int lane) {
    return kLanes == 1 ? i : 8 * (i / 2) + 2 * lane + i % 2;
}

// Element `index` of a tensor of T.
__device__ __forceinline__ float element_at(TrtNvfp4DataType dtype, void const* values, int64_t index) {
    if (dtype == TRT_NVFP4_FLOAT16) return ptx::to_float(static_cast<__half const*>(values)[index]);
    return ptx::to_float(static_cast<__nv_bfloat16 const*>(values)[index]);
}

__device__ __forceinline__ uint32_t to_pair(TrtNvfp4DataType dtype, float low, float high) {
    if (dtype == TRT_NVFP4_FLOAT16) {
        __half2 const pair = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    }
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
}

// What Dense does to a sum: scale, bias, activation, residual.
__device__ __forceinline__ float finish(W4A4Gemm const& gemm, float scale, float sum, int64_t row, int64_t column) {
    float const value = activate(gemm.activation, sum * scale + element_at(gemm.dtype, gemm.bias, column));
    return gemm.residual == nullptr ? value : value + element_at(gemm.dtype, gemm.residual, row * gemm.n + column);
}

__device__ __forceinline__ float gemm_scale(W4A4Gemm const& gemm) {
    return *gemm.a.tensor_scale * *gemm.w.tensor_scale;
}

template <int kLanes>
__device__ __forceinline__ void scale_and_bias(W4A4Gemm const& gemm, Fragment<kLanes>& values, int64_t column0,
                                               int lane) {
    float const scale = gemm_scale(gemm);
#pragma unroll
    for (int i = 0; i < kColumns / kLanes; ++i) {
        int64_t const column = column0 + fragment_column<kLanes>(i, lane);
        float const bias = column < gemm.n ? element_at(gemm.dtype, gemm.bias, column) : 0.0f;
        values[i] = values[i] * scale + bias;
    }
}

struct DenseOutput {
    using Gemm = W4A4Gemm;

    template <int kLanes>
    __device__ __forceinline__ static void store(W4A4Gemm const& gemm, Fragment<kLanes>& values, int64_t row,
                                                 int64_t column0, int lane, int) {
        if (row >= gemm.m) return;
        float const scale = gemm_scale(gemm);
        uint16_t* const out = static_cast<uint16_t*>(gemm.out) + row * gemm.n;
#pragma unroll
        for (int i = 0; i < kColumns / kLanes; i += 2) {
            int64_t const column = column0 + fragment_column<kLanes>(i, lane);
            if (column >= gemm.n) continue;
            float const low = finish(gemm, scale, values[i], row, column);
            if (column + 1 == gemm.n) {
                out[column] = static_cast<uint16_t>(to_pair(gemm.dtype, low, 0.0f));
                continue;
            }
            uint32_t const pair = to_pair(gemm.dtype, low, finish(gemm, scale, values[i + 1], row, column + 1));
            if (gemm.n % 2 == 0) {
                *reinterpret_cast<uint32_t*>(out + column) = pair;
            } else {
                out[column] = static_cast<uint16_t>(pair);
                out[column + 1] = static_cast<uint16_t>(pair >> 16);
            }
        }
    }
};

struct PartialOutput {
    using Gemm = W4A4Gemm;

    template <int kLanes>
    __device__ __forceinline__ static void store(W4A4Gemm const& gemm, Fragment<kLanes>& values, int64_t row,
                                                 int64_t column0, int lane, int split) {
        if (row >= gemm.m) return;
        float* const out = gemm.partials + (split * gemm.m + row) * gemm.n;
#pragma unroll
        for (int i = 0; i < kColumns / kLanes; i += 2) {
            int64_t const column = column0 + fragment_column<kLanes>(i, lane);
            if (gemm.n % 2 == 0 && column < gemm.n) {
                *reinterpret_cast<float2*>(out + column) = make_float2(values[i], values[i + 1]);
                continue;
            }
            if (column < gemm.n) out[column] = values[i];
            if (column + 1 < gemm.n) out[column + 1] = values[i + 1];
        }
    }
};

// A group of columns is one block of hidden values where gates and ups alternate, two without gates.
template <bool kGated>
struct HiddenOutput {
    using Gemm = W4A4Gemm;
    static constexpr int kBlocks = kGated ? 1 : 2;

    template <int kLanes>
    __device__ __forceinline__ static void store(W4A4Gemm const& gemm, Fragment<kLanes>& values, int64_t row,
                                                 int64_t column0, int lane, int) {
        constexpr int kValues = kBlock / kLanes;  // of a block, in this thread
        bool const inside = row < gemm.m && column0 < gemm.n;
        scale_and_bias<kLanes>(gemm, values, column0, lane);
        uint32_t amax_bits[kBlocks] = {};
#pragma unroll
        for (int i = 0; i < kBlocks * kValues; ++i) {
            if constexpr (kGated) {
                values[i] = gated_activate(gemm.activation, values[2 * i], values[2 * i + 1], gemm.alpha, gemm.limit);
            } else {
                values[i] = activate(gemm.activation, values[i]);
            }
            amax_bits[i / kValues] = max(amax_bits[i / kValues], ptx::magnitude_bits(values[i]));
        }
        if (gemm.amax_pass) {
            uint32_t const largest = ptx::warp_max(inside ? max(amax_bits[0], amax_bits[kBlocks - 1]) : 0u);
            if (threadIdx.x % 32 == 0) atomicMax(gemm.hidden.amax_bits, largest);
            return;
        }
        float const tensor_scale =
            resolve_tensor_scale(*gemm.hidden_scale, gemm.hidden.amax_bits, gemm.hidden.scale_search);
        int64_t const block0 = column0 / kColumns * kBlocks;
        if (row == 0 && block0 == 0 && lane == 0) *gemm.hidden.tensor_scale = tensor_scale;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            store_block<kLanes>(gemm, values + block * kValues, amax_bits[block], tensor_scale, row, block0 + block,
                                lane, inside);
        }
    }

 private:
    // Among the 16 of its block: a thread's value i.
    template <int kLanes>
    __device__ __forceinline__ static constexpr int position(int i, int lane) {
        return kGated && kLanes > 1 ? 4 * i + lane : fragment_column<kLanes>(i, lane);
    }

    // The codes of a block whose values are spread over kLanes threads, and its quantizer; every lane gets both.
    template <int kLanes>
    __device__ __forceinline__ static BlockQuantizer quantize(W4A4Gemm const& gemm, float const* values,
                                                              uint32_t amax_bits, float tensor_scale, int lane,
                                                              uint2& codes) {
        constexpr int kValues = kBlock / kLanes;
        constexpr int kNeighbours = kGated && kLanes > 1 ? 1 : 2;  // in this thread
#pragma unroll
        for (int offset = 1; offset < kLanes; offset *= 2) {
            amax_bits = max(amax_bits, __shfl_xor_sync(0xffffffffu, amax_bits, offset));
        }
        BlockQuantizer quantizer(amax_bits, tensor_scale);
        int32_t const scale_search = gemm.hidden.scale_search;
        if (scale_search != 0) {
            ScaleCandidates const candidates(amax_bits, tensor_scale, quantizer.block_scale, scale_search);
            quantizer.search<kLanes, kValues>(candidates, values);
        }
        codes = make_uint2(0u, 0u);
#pragma unroll
        for (int i = 0; i < kValues; i += kNeighbours) {
            float const next = kNeighbours == 2 ? values[i + 1] : 0.0f;
            uint32_t const code = quantizer.encode(values[i], next) << (4 * (position<kLanes>(i, lane) % 8));
            (i < kValues / 2 ? codes.x : codes.y) |= code;
        }
#pragma unroll
        for (int offset = 1; offset < kLanes; offset *= 2) {
            codes.x |= __shfl_xor_sync(0xffffffffu, codes.x, offset);
            codes.y |= __shfl_xor_sync(0xffffffffu, codes.y, offset);
        }
        return quantizer;
    }

    template <int kLanes>
    __device__ __forceinline__ static void store_block(W4A4Gemm const& gemm, float const* values, uint32_t amax_bits,
                                                       float tensor_scale, int64_t row, int64_t block, int lane,
                                                       bool inside) {
        constexpr int kValues = kBlock / kLanes;
        int64_t const residual_channels = gemm.hidden.residual_channels;
        int64_t const width = gemm.n / (kGated ? 2 : 1);
        int64_t const pitch = width + residual_channels;
        int64_t const blocks_padded = padded_blocks(pitch);
        // The padding of scales is read by the next GEMM: zeros.
        auto const write = [&](int64_t at, uint8_t block_scale, uint2 const& codes) {
            if (lane != 0 || row >= round_up(gemm.m, 128) || at >= blocks_padded) return;
            gemm.hidden.block_scales[scale_offset(row, at, blocks_padded)] = inside ? block_scale : 0;
            if (inside) *reinterpret_cast<uint2*>(gemm.hidden.packed + (row * pitch + at * kBlock) / 2) = codes;
        };
        uint2 codes;
        BlockQuantizer const first = quantize<kLanes>(gemm, values, amax_bits, tensor_scale, lane, codes);
        if (residual_channels == 0) return write(block, first.block_scale, codes);
        // The columns behind the last are where residual channels lie; what pads those is written with the last.
        int64_t const blocks = width / kBlock, repeated = residual_channels / kBlock;
        if (block >= blocks) return;
        write(block, first.block_scale, codes);
        if (block < blocks - repeated) return;
        float lost[kValues];
        amax_bits = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            lost[i] = first.lost(values[i], tensor_scale);
            amax_bits = max(amax_bits, ptx::magnitude_bits(lost[i]));
        }
        BlockQuantizer const second = quantize<kLanes>(gemm, lost, amax_bits, tensor_scale, lane, codes);
        write(block + repeated, second.block_scale, codes);
        if (block + 1 < blocks || lane != 0 || row >= round_up(gemm.m, 128)) return;
        for (int64_t at = blocks + repeated; at < blocks_padded; ++at) {
            gemm.hidden.block_scales[scale_offset(row, at, blocks_padded)] = 0;
        }
    }
};

}  // namespace trt_nvfp4
