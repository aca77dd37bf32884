// What a block of the decoder's attention works on, and its shared memory.
#pragma once

#include "attention/few_rows.cuh"
#include "decoder/decoder_args.cuh"
#include "w4a16/stream/sm80_w4a16_token.cuh"

namespace trt_nvfp4::decoder {

template <typename T, bool kFp8, int kHeadDim>
struct Attend {
    // Warps that share a stream of keys, a part of a longer head's dimensions each: sums of all of them would not fit a
    // thread's registers. They add up their parts of the scores.
    static constexpr int kParts = kHeadDim > 128 ? 2 : 1;
    static constexpr int kDims = kHeadDim / kParts;
    static constexpr int kKeys = kFp8 ? 32 : 16;  // of a tile
    using Sizes = attention::Tile<kFp8, kDims, kKeys>;
    static constexpr int kWarpBytes = 2 * Sizes::kBytes;  // a tile of keys, one of values
    static constexpr int kLaneDims = kHeadDim / 32;
    static constexpr int kSumPitch = kDims + 4;  // of a warp's sums, in place of its tiles
    using Scores = float[kKeys / 16][4];
    static constexpr int kScoreBytes = kParts > 1 ? sizeof(Scores) * 32 : 0;  // of a warp's part of a tile's scores
    static constexpr int kQueryBytes = kRows * attention::kQueryPitch<kHeadDim>;
    static_assert(kWarpBytes >= kRows * kSumPitch * 4, "a warp's sums take the place of its tiles");

    // New rows, as they are given: of queries, and of `tokens` keys and values.
    static __host__ __device__ constexpr int given_bytes(int tokens) { return (kRows + 2 * tokens) * kHeadDim * 2; }
    static __host__ __device__ constexpr int shared_bytes(int tokens, int warps) {
        return kQueryBytes + given_bytes(tokens) + warps * (kWarpBytes + 2 * kScoreBytes);
    }
};

using Softmaxes = float2[w4a16::kWarps][kRows];

// What a block does: rows [row0, row0 + rows) of a KV head by keys [begin, end) of a sequence. It lies in shared
// memory, and is read there wherever it is needed, because registers are few.
struct AttentionItem {
    int index, layer;
    int pair, slot;
    int batch;   // below 0: nothing
    int splits;  // of the sequence
    int kv_head, row0, rows;
    int past;  // the sequence's length before the call
    int begin, end;
    int seen_by_all;            // the first key that not every row attends to, but for a window
    int first_new, new_tokens;  // positions of the call's in reach
    uint8_t const* keys;        // the sequence's, of the KV head

    template <typename T>
    __device__ int token_of(DecoderArgs<T> const& args, int row) const {  // of the sequence
        return args.by_group.of(row0 + row);
    }
    template <typename T>
    __device__ int head_of(DecoderArgs<T> const& args, int row) const {
        return kv_head * args.attention.group + row0 + row - token_of(args, row) * args.attention.group;
    }
};

// What is cached of a sequence, and its slots: the same for all layers (attention/shares.cuh).
struct SharedSequence {
    int past, first, length;
    int first_slot, splits;
};

struct AttentionShared {
    Softmaxes softmaxes;
    SharedSequence sequences[kMostTokens];
    AttentionItem item;
};

}  // namespace trt_nvfp4::decoder
