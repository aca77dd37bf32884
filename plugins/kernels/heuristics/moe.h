// Launch choices of the W4A16 kernel for mixtures of experts.
#pragma once

#include <cmath>

#include "heuristics/w4a16.h"

namespace trt_nvfp4::w4a16 {

// Tokens of a launch: more go in blocks of this many, which bounds the workspace.
constexpr int kMoeTokens = 512;
// Two variants of the kernel: for work items of one column of eight pairs, and of up to this many.
constexpr int kMoeColumns = 4;
constexpr int kMoeMaxSplits = 4;
// Warps of a block that multiply, warps that fill their rings (sm80_w4a16_ring.cuh), and blocks of an SM, by the most
// columns of eight pairs that a work item has. With one column activations are few: several small blocks, so that one
// stages or finishes while others multiply.
template <int kMostColumns>
constexpr int kMoeWarps = kMostColumns == 1 ? 4 : 8;
template <int kMostColumns>
constexpr int kMoeProducers = kMostColumns == 1 ? 1 : 4;
template <int kMostColumns>
constexpr int kMoeThreads = 32 * (kMoeWarps<kMostColumns> + kMoeProducers<kMostColumns>);
template <int kMostColumns>
constexpr int kMoeBlocks = kMostColumns == 1 ? 3 : 1;
// Bytes that a block has in flight: 55 KB of an SM.
template <int kMostColumns>
constexpr int kMoeStagesInFlight = kMostColumns == 1 ? 4 : 12;
// More activations at a time are not worth a stage of the rings.
constexpr int kMoeStagedTileBytes = 72 << 10;

// Experts that `tokens` tokens are expected to choose, were every choice as likely.
inline float expected_experts(int experts, int top_k, int tokens) {
    float const missed = 1.0f - static_cast<float>(top_k) / static_cast<float>(experts);
    return static_cast<float>(experts) * (1.0f - std::pow(missed, static_cast<float>(tokens)));
}

// The most columns of eight pairs of a work item, by the chunks of the longer K. An expert with more pairs has several
// work items, which read its weights again. Where K is short and experts have up to four pairs on average, the small
// blocks of one column are up to 13 % faster (H200: Qwen3-30B-A3B at 12 to 64 tokens); with longer ones and more they
// are slower.
inline int moe_columns(int64_t tokens, int64_t top_k, int64_t experts, int chunks) {
    constexpr int kShort = 8;
    return tokens <= 8 || (chunks <= kShort && tokens * top_k <= 4 * experts) ? 1 : kMoeColumns;
}

struct MoeSplit {
    int k_groups = 1;  // warps of a block that share a tile's K
    int splits = 1;    // blocks that share it
};

// The split of least estimated time of `tiles` tiles in all, in units of a warp's chunk, by `blocks` blocks of `warps`
// on each SM; `m` tokens. Both are powers of two. `most_splits` is 1 where outputs cannot be summed later. Warps that
// share a tile wait for each other, the longer the more tokens it has (fitted to an H200).
inline MoeSplit choose_moe_split(float tiles, int chunks, int m, int most_splits, int warps, int blocks,
                                 Device const& device) {
    float const meeting = 0.5f + 0.1f * static_cast<float>(std::min(m, 8));
    MoeSplit best;
    float best_cost = 1e30f;
    for (int splits = 1; splits <= std::min(chunks, most_splits); splits *= 2) {
        float const summing = splits > 1 ? 0.6f + 0.25f * static_cast<float>(splits) : 0.0f;
        for (int k_groups = 1; k_groups <= warps; k_groups *= 2) {
            float const tasks = tiles * static_cast<float>(splits * k_groups) / static_cast<float>(warps);
            float const of_sm = std::ceil(tasks / static_cast<float>(device.sm_count));
            float const rounds = std::max(1.0f, of_sm / static_cast<float>(blocks));
            float const walk = static_cast<float>(ceil_div(ceil_div(chunks, splits), k_groups));
            float const cost = rounds * (walk + (k_groups > 1 ? meeting : 0.6f)) + summing;
            if (cost < best_cost) {
                best_cost = cost;
                best = {k_groups, splits};
            }
        }
    }
    return best;
}

// Stages of the rings and what is left for activations: as many stages as let `wanted` bytes of activations fit beside
// them, but not fewer than three where `least` bytes (one chunk of the widest work item) leave room for them.
struct MoeMemory {
    int stages, staged_tile_bytes;  // no stage: it does not fit
};

inline MoeMemory divide_moe_memory(int wanted, int least, int stage_bytes, int fixed, Device const& device) {
    int const free = device.shared_bytes - fixed;
    for (int stages = kMaxStages; stages >= 1; --stages) {
        int const staged_tile = free - stages * stage_bytes;
        if (staged_tile >= (stages > 3 ? std::max(wanted, least) : least)) return {stages, staged_tile};
    }
    return {0, 0};
}

}  // namespace trt_nvfp4::w4a16
