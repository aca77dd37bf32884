// Activations as wgmma reads them (operand B), ready to be copied into shared memory as they lie: the image of kTokens
// tokens is made of units of 16 bytes, image[unit][token], a unit being 8 values of K.
//
// K's order inside a contraction is free. In a group of 64 values lane t of a row's four multiplies scale block t: 16
// values in a row, so that it decodes one scale. Unit 4 w + p of a group holds, for t = 0..3, pair p of that block's
// word w: values p and p + 4, as decode.cuh's codes() has them, or of one token neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/cp_async.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kGroup = 64;   // values of K: eight units
constexpr int kChunk = 256;  // images are padded to whole chunks, with zeros

__host__ __device__ constexpr int chunks_of(int k) { return (k + kChunk - 1) / kChunk; }

__host__ __device__ constexpr int64_t image_bytes(int k, int tokens) {
    return int64_t{2} * chunks_of(k) * kChunk * tokens;
}

// The unit that value k lies in, and in bytes which of a pair it is.
template <bool kNeighbours>
__device__ __forceinline__ uint32_t unit_of(uint32_t k) {
    return k / kGroup * 8 + k % 16 / 8 * 4 + (kNeighbours ? k % 8 / 2 : k % 4);
}
template <bool kNeighbours>
__device__ __forceinline__ uint32_t half_of(uint32_t k) {
    return (kNeighbours ? k % 2 : k % 8 / 4) * 2;
}

// Where a value lies in an image of kTokens, in bytes, and how far it is to the same one of the next token, scale
// block, group. Unsigned, since what divides by powers of two is then one instruction.
template <int kTokens, bool kNeighbours = kTokens == 1>
struct ImageLayout {
    static constexpr int kTokenBytes = 16, kBlockBytes = 4, kGroupBytes = kGroup * 2 * kTokens;

    static __device__ __forceinline__ uint32_t offset(uint32_t k, uint32_t token) {
        return (unit_of<kNeighbours>(k) * kTokens + token) * kTokenBytes + k % kGroup / 16 * kBlockBytes +
               half_of<kNeighbours>(k);
    }
};

// BF16 activations become FP16 times factors (half_scale.cuh) where that takes less than it saves (H200): up to 8
// tokens, and in mixtures but for wide work items (kXBecomesHalf). One token by itself becomes integers
// (fixed_point.cuh: TokenStagedTile, TokenRowStagedTile).
template <typename T, int kTokens = 8>
constexpr bool kBecomesHalf = kTokens <= 8 && std::is_same_v<T, __nv_bfloat16>;
template <typename T, int kTokens = 8>
using Operand = std::conditional_t<kBecomesHalf<T, kTokens>, __half, T>;

// A chunk of K of some tokens in shared memory: as the image has it, and behind it a token's factor of all of it,
template <int kStagedTileTokens, bool kHasFactors = false>
struct ImageStagedTile {
    static constexpr int kTokens = kStagedTileTokens, kUnitBytes = 16 * kTokens, kTokenBytes = 16;
    static constexpr int kColumnBytes = 8 * kTokenBytes;  // from eight tokens to the next
    static constexpr int kFactorK = kHasFactors ? kChunk : 0;
    static constexpr int kGroupBytes = kUnitBytes * kGroup / 8;
    static constexpr int kBytes = kChunk * 2 * kTokens + (kHasFactors ? kUnitBytes : 0);

    static __host__ __device__ constexpr int factor_offset(int) { return kChunk / 8 * kUnitBytes; }
};

// or as images of eight tokens each, so that a staged tile of fewer is a part of it,
template <int kStagedTileTokens>
struct ColumnStagedTile {
    static constexpr int kTokens = kStagedTileTokens, kUnitBytes = 16 * 8, kTokenBytes = 16;
    static constexpr int kColumnBytes = kChunk * 2 * 8;
    static constexpr int kFactorK = 0;
    static constexpr int kGroupBytes = kUnitBytes * kGroup / 8;
    static constexpr int kBytes = kTokens / 8 * kColumnBytes;

    static __host__ __device__ constexpr int factor_offset(int) { return 0; }
};

// or of one token, by lanes: of each group the 16 values of block t side by side, for lane t of a row's four,
struct TokenStagedTile {
    static constexpr int kTokens = 1, kLaneBytes = 32, kGroupBytes = 2 * kGroup, kTokenBytes = 0;
    static constexpr int kFactorK = kChunk;
    static constexpr int kBytes = kChunk * 2 + 16;

    static __host__ __device__ constexpr int factor_offset(int) { return kChunk * 2; }
    // Where an image's unit has its pair of block t.
    static __device__ __forceinline__ uint32_t offset(uint32_t unit, uint32_t t) {
        return unit / 8 * kGroupBytes + t * kLaneBytes + unit % 8 * 4;
    }
    // A lane's pairs of a word of a group.
    static __device__ __forceinline__ uint4 load(uint32_t group, int word) {
        return ptx::load_shared_unit(group + word * 16);
    }
};

// or row by row, so that tokens may come from anywhere, with factors for kRowFactorK values each. 16 bytes behind a row
// keep rows in different banks.
constexpr int kRowFactorK = 128;
constexpr int kRowBytes = kChunk * 2 + 16;

template <bool kHasFactors>
struct RowStagedTile {
    static constexpr int kTokens = 8, kUnitBytes = 16, kTokenBytes = kRowBytes;
    static constexpr int kGroupBytes = kUnitBytes * kGroup / 8;
    static constexpr int kFactorK = kHasFactors ? kRowFactorK : 0;
    static constexpr int kBytes = kTokens * kRowBytes;

    static __host__ __device__ constexpr int factor_offset(int which) { return kChunk * 2 + which * 8; }
};

// One such row, whose products are summed as one token's.
struct TokenRowStagedTile : RowStagedTile<true> {
    static constexpr int kTokens = 1, kLaneBytes = 4, kTokenBytes = 0, kBytes = kRowBytes;

    static __device__ __forceinline__ uint4 load(uint32_t group, int word) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = ptx::load_shared_word(group + (word * 4 + i) * kUnitBytes);
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
};

}  // namespace trt_nvfp4::sm90
