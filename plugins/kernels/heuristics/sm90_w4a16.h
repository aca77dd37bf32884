// Launch choices of the SM90 W4A16 kernels: how rows and K are spread over clusters.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "heuristics/in_flight.h"

namespace trt_nvfp4::sm90 {

constexpr int kMaxTokens = 64;
constexpr int kMostSms = 144;   // of an SM90 GPU
constexpr int kTileRows = 256;  // of a block
constexpr int kMaxCluster = 2;
constexpr int kMaxSplits = 16;
// Rows times splits of a split projection: bounds the workspace without knowing the GPU.
constexpr int kMaxSplitRows = 65536;

// A cluster's blocks take neighbouring tiles at the same K.
TRT_NVFP4_HOST_DEVICE constexpr int padded_rows(int rows, int cluster) {
    return (rows + kTileRows * cluster - 1) / (kTileRows * cluster) * (kTileRows * cluster);
}

struct Split {
    int cluster = 1;  // blocks: 1 or 2
    int splits = 1;   // clusters that share a tile's K

    TRT_NVFP4_HOST_DEVICE int tasks(int rows) const {
        return padded_rows(rows, cluster) / (kTileRows * cluster) * splits;
    }
};

// True if the SM90 kernel serves a linear at `m` tokens, of BF16 or FP16. Eight linears were timed on an H200
// (benchmarks/notes): all are ahead of sm80_w4a16_mlp.cuh at 9 tokens and more, and those whose activations take
// long to lay out or to convert at fewer. Where few SMs' worth of outputs have a long K, sm80_w4a16_mlp.cuh, which
// divides it, is ahead up to 16 tokens (H100).
inline bool takes_linear(int m, int64_t n, int64_t k, bool bf16) {
    if (m <= 16 && n <= 1024 && k >= 8192) return false;
    if (k >= 6144) return m >= (bf16 ? 3 : 4);
    return m >= (!bf16 ? 9 : k >= 3072 ? 5 : 7);
}

// True if the SM90 kernel serves an MLP of x of width `hidden` at `m` tokens, by the share of SMs that have a tile of
// up, as each wave takes as long as a full one, and by the width, whose chunks one block walks. Over 19 MLPs timed on
// an H200 (benchmarks/results/kernels/crossovers_mlp.json) the kernel taken was ahead, or behind by at most 7 %; but
// twice, in bfloat16, by 11 and 17 %.
inline bool takes_layers(int m, int up_rows, int hidden, bool norm, int sms) {
    int const tiles = padded_rows(up_rows, 1) / kTileRows;
    int const rounds = (tiles + sms - 1) / sms;
    float const busy = static_cast<float>(tiles) / static_cast<float>(rounds * sms);
    bool const narrow = hidden <= 2048;
    if (busy >= 0.9f) return true;
    if (busy >= 0.6f) return m >= (norm ? 2 : 1);
    if (hidden <= 1536) return m >= 2;
    if (busy >= 0.45f) return m >= (narrow ? 2 : 5);
    if (busy >= 0.28f) return m >= (narrow ? 4 : 8);
    if (narrow) return m >= (norm ? 6 : 16);
    if (busy >= 0.15f) return m >= (norm ? 13 : 16);
    return m >= 20;
}

// Stages of so many bytes that an MLP's copies may be in flight of while its blocks wait for activations. One is too
// few on any GPU timed.
inline int choose_ahead(int weight_stage_bytes, int sms, float bandwidth) {
    return std::max(2, choose_in_flight(weight_stage_bytes, sms, bandwidth));
}

// The split of K of least estimated time, in chunks that a block walks. `clusters` of the given size run at once.
inline Split choose_split(int rows, int chunks, int cluster, int clusters) {
    Split best{cluster, 1};
    float best_cost = 1e30f;
    for (int splits = 1; splits <= std::min(chunks, kMaxSplits); ++splits) {
        if (splits > 1 && padded_rows(rows, cluster) * splits > kMaxSplitRows) break;
        Split const split{cluster, splits};
        int const rounds = (split.tasks(rows) + clusters - 1) / clusters;
        float const cost = static_cast<float>(rounds * ((chunks + splits - 1) / splits)) + 1.5f +
                           (splits > 1 ? 2.0f + 0.1f * static_cast<float>(splits) : 0.0f);
        if (cost < best_cost) {
            best_cost = cost;
            best = split;
        }
    }
    return best;
}

}  // namespace trt_nvfp4::sm90
