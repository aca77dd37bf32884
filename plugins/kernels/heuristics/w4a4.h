// W4A4 on tensor cores: the kernels that this library was compiled with and that the GPU can run, and their splits of
// K.
#pragma once

#include <algorithm>

#include "heuristics/architectures.h"
#include "w4a4/w4a4_experts.h"
#include "w4a4/w4a4_gemm.h"

namespace trt_nvfp4 {

using W4A4Launch = TrtNvfp4Status (*)(W4A4Gemm const&, cudaStream_t);
using W4A4ExpertsLaunch = TrtNvfp4Status (*)(W4A4ExpertsGemm const&, cudaStream_t);

struct W4A4Kernels {
    W4A4Launch dense, plain, gated;
    W4A4Launch partial;         // null: K is never split
    W4A4ExpertsLaunch experts;  // null: does not serve mixtures
    int sm_count;
};

constexpr int kW4a4Tile = 128;  // rows and columns
constexpr int kMaxKSplits = 16;
constexpr int kMaxSplitTiles = 256;  // no GPU has more SMs to fill

// How many parts K is cut into: as many as find an idle SM, none shorter than what hides a pipeline's start.
inline int choose_splits(int64_t m, int64_t n, int64_t k, int sm_count) {
    constexpr int64_t kShortest = 512;
    constexpr int64_t kGrain = 64;  // values of K in a tile of scales
    int64_t const tiles = (m + kW4a4Tile - 1) / kW4a4Tile * ((n + kW4a4Tile - 1) / kW4a4Tile);
    int best = 1;
    for (int splits = 2; splits <= kMaxKSplits; ++splits) {
        if (tiles * splits > std::min(sm_count, kMaxSplitTiles) || k < splits * kShortest) break;
        if (k % (splits * kGrain) == 0) best = splits;
    }
    return best;
}

// Partial sums that a GEMM may need on any GPU; never fewer for more rows.
inline int64_t split_elements(int64_t m, int64_t n) {
    return std::min(kMaxKSplits * m * n, int64_t{kMaxSplitTiles} * kW4a4Tile * kW4a4Tile);
}

// The kernels of the current GPU that `tactic` names; null where this library has none.
inline W4A4Kernels w4a4_kernels(TrtNvfp4Tactic tactic) {
    if (tactic == TRT_NVFP4_TACTIC_W4A4_UNSPLIT) {
        W4A4Kernels unsplit = w4a4_kernels(TRT_NVFP4_TACTIC_W4A4);
        unsplit.partial = nullptr;
        return unsplit;
    }
    int device = 0;
    int major = 0;
    int sm_count = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return {};
    }
#ifdef TRT_NVFP4_SM120
    if (major == 12 && tactic == TRT_NVFP4_TACTIC_W4A4) {
        return {sm120_w4a4_dense, sm120_w4a4_plain, sm120_w4a4_gated, sm120_w4a4_partial, sm120_w4a4_experts, sm_count};
    }
#endif
#ifdef TRT_NVFP4_SM100
    if ((major == 10 || major == 11) && tactic == TRT_NVFP4_TACTIC_W4A4) {
        return {sm100_w4a4_dense, sm100_w4a4_plain, sm100_w4a4_gated, sm100_w4a4_partial, sm100_w4a4_experts, sm_count};
    }
#ifndef TRT_NVFP4_WITHOUT_PAIRS
    // Thor (11) gains nothing from clusters: its own library is compiled without them.
    if (major == 10 && tactic == TRT_NVFP4_TACTIC_W4A4_PAIR) {
        return {sm100_w4a4_dense_pair, sm100_w4a4_plain_pair, sm100_w4a4_gated_pair, nullptr, nullptr, sm_count};
    }
#endif
#endif
    return {};
}

// Whether they serve every call that fits: none needs room for the generic kernels, whose hidden values are float32.
constexpr bool kW4a4Everywhere = on_every_architecture([]([[maybe_unused]] int architecture) {
#ifdef TRT_NVFP4_SM120
    if (architecture >= 1200) return true;
#endif
#ifdef TRT_NVFP4_SM100
    if (architecture >= 1000 && architecture < 1200) return true;
#endif
    return false;
});

// Whether the kernels that a library for these GPUs may have were linked.
inline bool w4a4_is_linked() {
#ifdef TRT_NVFP4_SM120
    if (sm120_w4a4_dense == nullptr) return false;
#endif
#ifdef TRT_NVFP4_SM100
    if (sm100_w4a4_dense == nullptr) return false;
#endif
    return true;
}

// The same of those that write gated hidden values.
inline bool w4a4_gated_is_linked() {
#ifdef TRT_NVFP4_SM120
    if (sm120_w4a4_gated == nullptr) return false;
#endif
#ifdef TRT_NVFP4_SM100
    if (sm100_w4a4_gated == nullptr) return false;
#endif
    return true;
}

// TMA wants rows of packed operands, residual channels included, to start on 16 bytes.
template <typename Args>
bool w4a4_depth_fits(Args const& args, int64_t k) {
    return (k + args.residual_channels) % 32 == 0;
}

inline bool w4a4_fits(TrtNvfp4LinearArgs const& args) {
    return args.quantize_activations && args.dtype != TRT_NVFP4_FLOAT32 && w4a4_depth_fits(args, args.k);
}

inline bool w4a4_fits(TrtNvfp4MlpArgs const& args) {
    return args.quantize_activations && args.dtype != TRT_NVFP4_FLOAT32 && w4a4_depth_fits(args, args.hidden_in) &&
           w4a4_depth_fits(args, args.intermediate);
}

inline bool w4a4_fits(TrtNvfp4MoeArgs const& args) {
    return args.quantize_activations && args.dtype != TRT_NVFP4_FLOAT32 && w4a4_depth_fits(args, args.hidden) &&
           w4a4_depth_fits(args, args.intermediate) &&
           (!args.shared || w4a4_depth_fits(args, args.shared_intermediate));
}

// Whether the generic kernels may run: by choice, or where AUTO finds no others.
template <typename Args>
bool w4a4_may_be_generic(Args const& args) {
    return args.tactic == TRT_NVFP4_TACTIC_GENERIC || !(kW4a4Everywhere && w4a4_fits(args));
}

// Parts of K of the last GEMM, the only one that may be split.
inline int w4a4_splits(TrtNvfp4LinearArgs const& args, int sm_count) {
    return choose_splits(args.m, args.n, args.k + args.residual_channels, sm_count);
}

inline int w4a4_splits(TrtNvfp4MlpArgs const& args, int sm_count) {
    return choose_splits(args.m, args.hidden_out, args.intermediate + args.residual_channels, sm_count);
}

}  // namespace trt_nvfp4
