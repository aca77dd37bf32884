// Tiles of rows of one projection after another, by all blocks of a launch: which of them are a warp's, and its weights
// in flight through all phases.
#pragma once

#include "api/trt_nvfp4.h"
#include "common/divisor.h"
#include "exchange/tagged_words.cuh"
#include "w4a16/stream/sm80_w4a16_ring.cuh"

namespace trt_nvfp4::w4a16 {

constexpr int kThreads = 32 * kWarps;  // that multiply
constexpr int kProducers = 4;          // warps that fill the rings
constexpr int kBlockThreads = kThreads + 32 * kProducers;

// One projection, for all layers. A block's task is a group of tiles of rows by one of `splits` parts of K.
struct Projection {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    void const* bias;
    int64_t codes_per_layer, scales_per_layer;
    int rows, k;
    Split split;
    // The first groups have a tile more than the others, the first splits a chunk.
    int group_tiles, larger_groups, split_chunks, larger_splits;
    int tasks;
    Divisor by_splits, by_tiles[2];  // of a group, of a larger one

    __host__ __device__ int chunks() const { return (k + kChunk - 1) / kChunk; }
    __host__ __device__ int tiles() const { return (rows + 127) / 128 * kTilesPerGroup; }
};

// A task and one warp's part of it. The chunks of all tiles, of a staged tile at a time and tile by tile, are dealt out
// evenly: a warp has some of tile number `tile` of the task's, and perhaps some of the next.
struct WarpTask {
    int first_tile, tiles, split;
    int begin, end;  // chunks
    int warp, tile;
    Divisor by_tiles;

    __device__ __forceinline__ WarpTask(Projection const& p, int task, int warp) : warp(warp) {
        int const group = p.by_splits.of(task);
        split = task - group * p.split.splits;
        bool const larger = group < p.larger_groups;
        first_tile = group * p.group_tiles + min(group, p.larger_groups);
        tiles = p.group_tiles + larger;
        by_tiles = larger ? p.by_tiles[1] : p.by_tiles[0];
        begin = split * p.split_chunks + min(split, p.larger_splits);
        end = begin + p.split_chunks + (split < p.larger_splits);
        tile = warp * tiles / kWarps;
    }

    // A warp's part of so many chunks: its first chunk of its first tile, how many it has of that and of the next, and
    // the most that any warp has.
    struct Part {
        int first, of_tile, of_next, most;
    };
    __device__ __forceinline__ Part part(int chunks) const {
        int const from = warp * tiles * chunks / kWarps - tile * chunks;
        int const to = (warp + 1) * tiles * chunks / kWarps - tile * chunks;
        return {from, min(to, chunks) - from, max(to - chunks, 0), (tiles * chunks + kWarps - 1) / kWarps};
    }

    // The warps whose first tile is `tile`: the first of them. The warp before it may have the tile's first chunks.
    __device__ __forceinline__ int first_warp(int tile) const { return by_tiles.of(tile * kWarps + tiles - 1); }
    // Whether no warp has parts of two tiles.
    __device__ __forceinline__ bool is_whole() const {
        static_assert((kWarps & (kWarps - 1)) == 0);
        return tiles <= kWarps && (tiles & (tiles - 1)) == 0;
    }
};

// Phases alternate between the launch's projections: up and down of layer 0, of layer 1, ...
template <int kProjections>
struct Program {
    Projection projections[kProjections];
    int first_phase, last_phase;  // half open
};

// What surrounds one projection. Its output is [m, rows], or [m, rows / 2] when gated.
template <typename T>
struct Surroundings {
    T const* norm_weight;  // [layers, k]; null: no RMSNorm in front
    TrtNvfp4Activation activation;
    bool gated;
    bool residual;  // adds the layer's x
};

// Arguments that every kernel for phases has.
template <typename T, int kProjections>
struct PhasesArgs {
    Program<kProjections> program;
    Surroundings<T> surroundings[kProjections];
    int layers, m;
    Divisor by_tokens;
    int blocks;  // that have a task in every phase: these sum the parts of split tiles
    float epsilon, alpha, limit;
    T const* x;
    T* y;
    Partial* partials[kProjections];  // [tiles, splits, m, kTileRows]
    SharedMemory shared;
    int in_flight;  // stages that a producer warp keeps in flight
    uint32_t one;   // 1, see shift_left
};

// What a warp multiplies of a staged tile: chunks of a tile, and then perhaps of the next.
template <class Copies>
struct WarpCopies {
    Copies of_tile, of_next;

    __device__ __forceinline__ bool copy(uint32_t stage) { return of_tile.copy(stage) || of_next.copy(stage); }
};

// What a phase computes: a projection of a layer, of all tokens, or of one where they take turns.
struct Step {
    int which, layer, token;
};

// Weights that lie layer by layer.
struct LayerWeights {
    using Copies = TileCopies;

    template <int kProjections>
    __device__ __forceinline__ Step step(int phase) const {
        return {phase % kProjections, phase / kProjections, 0};
    }
    __device__ __forceinline__ void await(Step const&) const {}
    __device__ __forceinline__ Copies copies(Projection const& p, Step const& step, int tile, int begin,
                                             int end) const {
        return TileCopies({p.codes + step.layer * p.codes_per_layer, p.scales + step.layer * p.scales_per_layer, p.rows,
                           p.k, tile, begin, end, 1});
    }
};

// The weights of all phases, by one of the producer warps, for some of the consumer warps. `weights` says what a
// phase is, and where they are, once that is known.
template <typename T, int kProjections, class Weights = LayerWeights>
__device__ __forceinline__ void produce_phases(PhasesArgs<T, kProjections> const& args, int producer,
                                               Rings<kWarps> const& rings, Weights const& weights = {}) {
    Program<kProjections> const& program = args.program;
    int const staged_tile_chunks = args.shared.staged_tile_chunks;
    constexpr int kRings = kWarps / kProducers;
    int const first = uniform(producer) * kRings;
    RingPosition at;
    for (int phase = program.first_phase; phase < program.last_phase; ++phase) {
        Step const of_phase = weights.template step<kProjections>(phase);
        Projection const& p = program.projections[of_phase.which];
        if (static_cast<int>(blockIdx.x) < p.tasks) weights.await(of_phase);
        for (int index = blockIdx.x; index < p.tasks; index += gridDim.x) {
            WarpTask const whole(p, index, 0);
            for (int begin = whole.begin; begin < whole.end; begin += staged_tile_chunks) {
                WarpCopies<typename Weights::Copies> tiles[kRings];
                int steps = 0;
#pragma unroll
                for (int i = 0; i < kRings; ++i) {
                    WarpTask const task(p, index, first + i);
                    WarpTask::Part const part = task.part(min(staged_tile_chunks, task.end - begin));
                    auto const copies = [&](int tile, int first_chunk, int chunks) {
                        return weights.copies(p, of_phase, task.first_tile + tile, first_chunk, first_chunk + chunks);
                    };
                    tiles[i].of_tile = copies(task.tile, begin + part.first, part.of_tile);
                    if (part.of_next > 0) tiles[i].of_next = copies(task.tile + 1, begin, part.of_next);
                    steps = part.most;
                }
                fill<(kProjections > 1)>(args.in_flight, rings, at, first, tiles, steps);
            }
        }
    }
}

}  // namespace trt_nvfp4::w4a16
