// Launch choices of FP8GatedMLP and FP8MoE on tensor cores: tiles, clusters and splits of K. Those of SM90 as measured
// on an H200 for layers of 1024/4096 to 4096/11008 at 16 to 968 tokens (benchmarks/notes), the others after them,
// not measured.
#pragma once

#include <climits>

#include "fp8/fp8_experts.h"
#include "heuristics/architectures.h"

namespace trt_nvfp4::fp8 {

using Launch = TrtNvfp4Status (*)(Fp8Gemm const&, cudaStream_t);
using ExpertsLaunch = TrtNvfp4Status (*)(Fp8ExpertsGemm const&, cudaStream_t);

constexpr int kMaxSplits = 8;
// Tiles times splits of a split GEMM: bounds the workspace without knowing the GPU. All fit on an H200 at a time.
constexpr int kMaxSplitTiles = 132;
constexpr int64_t kMaxArrivals = int64_t{kMaxSplitTiles} * kFp8Warps;
constexpr int64_t kMaxPartials = int64_t{kMaxSplitTiles} * 128 * 128;

struct Split {
    Launch launch;
    int splits;
};

inline int64_t tiles_of(Fp8Gemm const& gemm, int64_t rows, int64_t columns) {
    return (gemm.m + rows - 1) / rows * ((gemm.n + columns - 1) / columns);
}

// Splits of K that fill the SMs with tiles of rows x columns, none shorter than `least`.
inline int choose_splits(Fp8Gemm const& gemm, int64_t rows, int64_t columns, int64_t least = 16) {
    int64_t const tiles = tiles_of(gemm, rows, columns);
    int splits = 1;
    while (splits < kMaxSplits && 2 * splits * tiles <= kMaxSplitTiles && gemm.k >= 2 * splits * least &&
           gemm.k / 16 % (2 * splits) == 0) {
        splits *= 2;
    }
    return splits;
}

// Rows of a tile of experts, and so the most pairs of a work item: no more than an expert gets on average, as far as
// there are such tiles (measured on an H200, benchmarks/notes). Whatever the GPU, so that it sizes the workspace.
inline int expert_rows(int64_t pairs, int64_t experts) { return pairs <= 64 * experts ? 64 : 128; }

#ifdef TRT_NVFP4_SM90
inline ExpertsLaunch choose_experts_sm90(int rows) {
    return rows == 64 ? sm90_fp8_experts_64x128 : sm90_fp8_experts_128x128;
}

// Where the tiles of a cluster follow each other along rows, none of them is beyond the last.
inline Launch choose_gated_sm90(Fp8Gemm const& gemm) {
    int64_t const strips = (gemm.m + 63) / 64, tiles = (strips + 1) / 2;
    if (strips == 2) return sm90_fp8_gated_64x128_rows;
    if (strips <= 3) return sm90_fp8_gated_64x128;
    return tiles % 2 == 0 ? sm90_fp8_gated_128x128_rows : sm90_fp8_gated_128x128_columns;
}

// The smallest tiles that the SMs multiply all at a time, but for a long K of many rows, which is split instead. To add
// up shorter splits than these takes longer than they save.
inline Split choose_dense_sm90(Fp8Gemm const& gemm) {
    int64_t const strips = (gemm.m + 63) / 64, tiles = (strips + 1) / 2;
    bool const rather_split = strips > 4 && gemm.k >= 16384;
    auto const at_a_time = [&](int64_t columns) {
        return !rather_split && tiles_of(gemm, 64, columns) <= kMaxSplitTiles;
    };
    if (strips == 1) return {sm90_fp8_dense_64x64, choose_splits(gemm, 64, 64, 4096)};
    if (strips == 4 && (gemm.k >= 8192 || !at_a_time(64))) {
        return {sm90_fp8_dense_128x64, choose_splits(gemm, 128, 64, 4096)};
    }
    if (at_a_time(64)) return {sm90_fp8_dense_64x64, choose_splits(gemm, 64, 64, 8192)};
    if (at_a_time(128)) return {sm90_fp8_dense_64x128, choose_splits(gemm, 64, 128, 8192)};
    Launch const launch = tiles % 2 == 0 ? sm90_fp8_dense_128x128_rows : sm90_fp8_dense_128x128_columns;
    return {launch, choose_splits(gemm, 128, 128, 8192)};
}
#endif

#ifdef TRT_NVFP4_SM89
inline Launch choose_gated_sm89(Fp8Gemm const& gemm) {
    return gemm.m <= 64 ? sm89_fp8_gated_64x128 : sm89_fp8_gated_128x128;
}

inline Split choose_dense_sm89(Fp8Gemm const& gemm) {
    if (gemm.m <= 64) return {sm89_fp8_dense_64x128, choose_splits(gemm, 64, 128)};
    return {sm89_fp8_dense_128x128, choose_splits(gemm, 128, 128)};
}
#endif

struct Kernels {
    Launch (*gated)(Fp8Gemm const&);
    Split (*dense)(Fp8Gemm const&);
    ExpertsLaunch (*experts)(int rows);  // null: do not serve mixtures
    bool programmatic;                   // wait for the kernels before them themselves
};

// Those of the current GPU; null where this library has none.
inline Kernels kernels() {
    int device = 0;
    int major = 0;
    int minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        return {};
    }
#ifdef TRT_NVFP4_SM90
    if (major == 9) return {choose_gated_sm90, choose_dense_sm90, choose_experts_sm90, true};
#endif
#ifdef TRT_NVFP4_SM89
    // SM100 would convert to 16 bits first.
    if ((major == 8 && minor == 9) || major == 12) return {choose_gated_sm89, choose_dense_sm89, nullptr, false};
#endif
    return {};
}

inline bool fits(TrtNvfp4Fp8MlpArgs const& args) {
    return args.dtype != TRT_NVFP4_FLOAT32 && args.hidden_out % 8 == 0 && args.m <= INT_MAX - 127 &&
           args.intermediate <= INT_MAX / 2;
}

// Whether there are kernels and they serve the call.
inline bool serves(TrtNvfp4Fp8MlpArgs const& args) { return kernels().gated != nullptr && fits(args); }

// Whether those for MLPs serve every call that fits, and no room is needed for the generic kernels' hidden values.
constexpr bool kMlpsEverywhere = on_every_architecture([]([[maybe_unused]] int architecture) {
#ifdef TRT_NVFP4_SM90
    if (architecture == 900) return true;
#endif
#ifdef TRT_NVFP4_SM89
    if (architecture >= 1200) return true;
#endif
    return false;
});

// As kernels without a gate are not worth their size, they are generic.
inline bool serves(TrtNvfp4Fp8MoeArgs const& args) {
    TrtNvfp4MoeArgs const& moe = args.moe;
    return kernels().experts != nullptr && moe.dtype != TRT_NVFP4_FLOAT32 && moe.gated;
}

}  // namespace trt_nvfp4::fp8
