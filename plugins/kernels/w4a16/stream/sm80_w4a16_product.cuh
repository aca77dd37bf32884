// A tile of weights times a chunk of activations on the tensor cores: weights are the A operand, tokens the columns.
//
// K's order inside a contraction is free. In a chunk of 256 values lane t of a row's four takes values 64t to 64t + 63:
// whole scale blocks, read in 16 bytes. Activations are staged in shared memory in the order that matches.
#pragma once

#include <type_traits>

#include "ptx/mma_sync.cuh"
#include "w4a16/stream/sm80_w4a16_decode.cuh"
#include "w4a16/stream/sm80_w4a16_ring.cuh"

namespace trt_nvfp4::w4a16 {

// Rows g + {0, 32} and g + {64, 96} of a tile by the tokens of a column.
template <int kColumns>
using Accumulators = float[2][kColumns][4];

// The product of up to 8 * kColumns tokens. BF16 activations of up to 8 tokens are multiplied as FP16: weights take 10
// instead of 13 operations then, or one where the GPU converts E2M1, which it only does to FP16. For that, staged
// values of a token and chunk have a factor, a power of two. At 8 tokens it saves what staging costs, at more less.
template <typename T, int kColumns>
struct Product {
    using Operand = std::conditional_t<kColumns == 1, __half, T>;
    static constexpr bool kHasFactors = !std::is_same_v<Operand, T>;
    static constexpr int kTokens = 8 * kColumns;

    // Places for a column's tokens in a staged chunk. Up to m = 4, in one column, only m: the memory left goes to
    // weights, and K fits without being staged in parts.
    static __host__ __device__ constexpr int places(int m) { return kColumns == 1 && m <= 4 ? m : 8; }
    // Where factors are in a chunk of the staged tile.
    static __host__ __device__ constexpr int factors(int m) { return kChunk * 2 * kColumns * places(m); }
    static __host__ __device__ constexpr int chunk_bytes(int m) { return factors(m) + (kHasFactors ? 4 * kTokens : 0); }
};

// acc += this warp's tile of weights times a chunk of activations. Rows of lane 4g + t: g + {0, 32, 64, 96}. In the
// staged tile columns are `pitch` lanes' 16 bytes apart, of which this lane reads number `place`. kHalves of the chunk
// are in the program: both, or one twice where the whole would fill an SM's instruction cache.
template <typename T, int kColumns, int kHalves, int kAccumulated>
__device__ __forceinline__ void multiply_values(uint8_t const* stage, uint8_t const* staged_tile, int lane, int pitch,
                                                int place, uint32_t one, Accumulators<kAccumulated>& acc) {
    int const g = lane / 4;
    int const t = lane % 4;
    uint4 const scales = *reinterpret_cast<uint4 const*>(stage + kCodeBytes + t * 128 + (g ^ (t * 2)) * 16);
    uint32_t const row_scales[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll kHalves
    for (int half = 0; half < 2; ++half) {
        uint4 codes[4];
        uint32_t scales_of[4];  // two blocks' each
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            codes[row] =
                *reinterpret_cast<uint4 const*>(stage + (row * 8 + g) * (kChunk / 2) + ((2 * t + half) ^ (g & 1)) * 16);
            scales_of[row] = Decoder<T>::scales(row_scales[row] >> half * 16, one);
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            uint32_t a[4][4];
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                uint4 const& c = codes[row];
                Decoder<T>::codes(word == 0 ? c.x : word == 1 ? c.y : word == 2 ? c.z : c.w, one, a[row]);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    a[row][pair] = word < 2 ? multiply_by_half<T, 0>(a[row][pair], scales_of[row])
                                            : multiply_by_half<T, 1>(a[row][pair], scales_of[row]);
                }
            }
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                uint4 const b = *reinterpret_cast<uint4 const*>(
                    staged_tile + (((half * 4 + word) * kColumns + column) * pitch + place) * 16);
                // Neighbours in this order belong to different accumulators, so that none waits for the one before.
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto const& top = a[2 * i];
                    auto const& bottom = a[2 * i + 1];
                    ptx::mma_m16n8k16<T>(acc[i][column], top[0], bottom[0], top[1], bottom[1], b.x, b.y);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto const& top = a[2 * i];
                    auto const& bottom = a[2 * i + 1];
                    ptx::mma_m16n8k16<T>(acc[i][column], top[2], bottom[2], top[3], bottom[3], b.z, b.w);
                }
            }
        }
    }
}

// The same of a staged tile as Product describes it: columns beyond its places repeat others, and are not kept.
template <typename T, int kColumns, int kHalves>
__device__ __forceinline__ void multiply_chunk(uint8_t const* stage, uint8_t const* staged_tile, int places,
                                               uint32_t one, Accumulators<kColumns>& acc) {
    int lane = threadIdx.x % 32;
    // So that what follows from it is not kept in registers beside so many accumulators.
    if (kColumns == 4) asm volatile("" : "+r"(lane));
    int const place = kColumns == 1 ? min(lane / 4, places - 1) * 4 + lane % 4 : lane;
    multiply_values<T, kColumns, kHalves>(stage, staged_tile, lane, kColumns == 1 ? places * 4 : 32, place, one, acc);
}

// The same of T, of the staged tile of m tokens.
template <typename T, int kColumns, int kHalves = 2>
__device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* staged_tile, int m, uint32_t one,
                                         Accumulators<kColumns>& acc) {
    using P = Product<T, kColumns>;
    if constexpr (!P::kHasFactors) {
        multiply_chunk<T, kColumns, kHalves>(stage, staged_tile, P::places(m), one, acc);
    } else {
        Accumulators<kColumns> of_chunk = {};
        multiply_chunk<typename P::Operand, kColumns, kHalves>(stage, staged_tile, P::places(m), one, of_chunk);
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            float2 const factors =
                *reinterpret_cast<float2 const*>(staged_tile + P::factors(m) + (column * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& sum = acc[i / 4][column][i % 4];
                sum = fmaf(of_chunk[i / 4][column][i % 4], i % 2 == 0 ? factors.x : factors.y, sum);
            }
        }
    }
}

}  // namespace trt_nvfp4::w4a16
