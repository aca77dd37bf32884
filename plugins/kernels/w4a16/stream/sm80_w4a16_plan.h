// How the projections of a launch for phases (sm80_w4a16_phases.cuh) are spread over the GPU's blocks.
#pragma once

#include <algorithm>

#include "api/launch.h"
#include "heuristics/w4a16.h"
#include "w4a16/stream/sm80_w4a16_phases.cuh"

namespace trt_nvfp4::w4a16 {

inline Projection make_projection(TrtNvfp4Weight const& weight, int64_t rows, int64_t k) {
    Projection p{};
    p.codes = static_cast<uint8_t const*>(weight.packed);
    p.scales = static_cast<uint8_t const*>(weight.block_scales);
    p.tensor_scale = weight.tensor_scale;
    p.bias = weight.bias;
    p.codes_per_layer = rows * k / 2;
    p.scales_per_layer = scale_bytes(rows, k);
    p.rows = static_cast<int>(rows);
    p.k = static_cast<int>(k);
    return p;
}

// Partial sums of a projection at the most splits that choose_split may take on any GPU.
inline int64_t most_partials(int64_t rows, int64_t k, int64_t m) {
    Projection const p = make_projection({}, rows, k);
    int const splits = std::min({p.chunks(), kMaxSplits, kMaxSplitTiles / p.tiles()});
    return splits > 1 ? int64_t{1} * p.tiles() * splits * m * kTileRows : 0;
}

inline void set_split(Projection& p, Split split) {
    p.split = split;
    p.group_tiles = p.tiles() / split.groups;
    p.larger_groups = p.tiles() % split.groups;
    p.split_chunks = p.chunks() / split.splits;
    p.larger_splits = p.chunks() % split.splits;
    p.tasks = split.groups * split.splits;
    p.by_splits = Divisor(split.splits);
    p.by_tiles[0] = Divisor(p.group_tiles);
    p.by_tiles[1] = Divisor(p.group_tiles + 1);
}

template <typename T, int kProjections>
void take_partials(PhasesArgs<T, kProjections>& args, Workspace& workspace) {
    Projection const* const p = args.program.projections;
    for (int i = 0; i < kProjections; ++i) {
        int64_t const parts = int64_t{1} * p[i].tiles() * p[i].split.splits * args.m * kTileRows;
        args.partials[i] = p[i].split.splits > 1 ? workspace.take<Partial>(parts) : nullptr;
    }
}

}  // namespace trt_nvfp4::w4a16
