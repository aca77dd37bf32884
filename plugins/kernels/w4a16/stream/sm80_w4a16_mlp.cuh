// y = MLP layers of x, or one linear, at 2 to 8 * kColumns tokens (one token: sm80_w4a16_token.cuh): weights stream
// once from global memory to the tensor cores (A operand), tokens are the columns. One block per SM; a launch of
// several phases needs all blocks co-resident.
//
// Consumer warps await activations, stage them (sm80_w4a16_staging.cuh) and multiply; producer warps keep weights
// in flight (sm80_w4a16_phases.cuh).
//
// What blocks exchange (exchange/):
//
//     buffer              writer            readers              what must precede an overwrite
//     x_ring[l % 5]       down of l - 1     up, residual of l    every block erased x(l - 2) in down of l, and a value
//                                                                of x(l + 2) or hidden(l + 1) has been seen
//     hidden_ring[l % 4]  up of l           down of l            the same: erased in down of l + 2, fence in between
//     partials[up, down]  tasks of a split  all blocks, same     the phase in the word; the next use is a layer later,
//                         phase             phase                and needs all of this layer's output
//     y                   down of the last  the caller           the launch ends
//
// Why two more places than layers in use suffice: one value of x(l) needs all of hidden(l - 1), which needs all of
// x(l - 1), and so the end of down of layer l - 2. So a block that has come to down of layer l may erase its slices of
// hidden(l - 2) and x(l - 2); it fences before it publishes anything of its own. Whoever has seen all of x(l + 1) has
// seen something of every erasing block behind its fence. Before hidden(l + 2) takes that place, everybody who writes
// or awaits it has; so with x(l + 3), even for a block that has no task of down and has only seen a part of x(l + 2).
#pragma once

#include <type_traits>

#include "common/programmatic_launch.cuh"
#include "common/smooth_activation.cuh"
#include "ptx/prefetch.cuh"
#include "w4a16/stream/sm80_w4a16_phases.cuh"
#include "w4a16/stream/sm80_w4a16_staging.cuh"

namespace trt_nvfp4::w4a16 {

// Whether a warp may have parts of two tiles: twice the accumulators.
template <int kColumns>
constexpr bool kSharesWarps = kColumns <= 2;

// A layer's x and hidden lie in rings, because a slow block may still read what the next layer would overwrite (see the
// table above). All values are sentinels before a launch.
constexpr int kXBuffers = 5;
constexpr int kHiddenBuffers = 4;

template <typename T, int kProjections>
struct MlpArgs : PhasesArgs<T, kProjections> {
    T* x_ring;       // [kXBuffers, m, k], from layer 1 on
    T* hidden_ring;  // [kHiddenBuffers, m, intermediate]
};

template <typename T, int kProjections>
struct Phase {
    int which, layer;
    bool last;  // of the layer
    Projection const& projection;
    T const* in;
    T* out;

    __device__ __forceinline__ Phase(MlpArgs<T, kProjections> const& args, int phase)
        : which(phase % kProjections),
          layer(phase / kProjections),
          last(which == kProjections - 1),
          projection(args.program.projections[which]) {
        T* const hidden = hidden_of(args, layer);
        in = which == 0 ? input_of(args, layer) : hidden;
        out = !last ? hidden : layer == args.layers - 1 ? args.y : x_of(args, layer + 1);
    }

    // In values; an int, because 32 tokens of them are far from 2^31.
    static __device__ __forceinline__ int x_size(MlpArgs<T, kProjections> const& args) {
        return args.m * args.program.projections[0].k;
    }
    static __device__ __forceinline__ int hidden_size(MlpArgs<T, kProjections> const& args) {
        return args.m * args.program.projections[kProjections - 1].k;
    }
    static __device__ __forceinline__ T* x_of(MlpArgs<T, kProjections> const& args, int layer) {
        return args.x_ring + layer % kXBuffers * x_size(args);
    }
    static __device__ __forceinline__ T const* input_of(MlpArgs<T, kProjections> const& args, int layer) {
        return layer == 0 ? args.x : x_of(args, layer);
    }
    static __device__ __forceinline__ T* hidden_of(MlpArgs<T, kProjections> const& args, int layer) {
        return args.hidden_ring + layer % kHiddenBuffers * hidden_size(args);
    }
};

// Accumulators of eight tokens turned so that a lane holds a row of the tile: row lane % 8 of quarter lane / 8.
constexpr int kTurnPitch = kTileRows + 4;  // keeps the writes free of bank conflicts
using Turned = float[8][kTurnPitch];

__device__ __forceinline__ void turn(float const (&top)[4], float const (&bottom)[4], Turned& turned) {
    int const g = threadIdx.x % 32 / 4;
    int const token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        turned[token + i][g] = top[i];
        turned[token + i][8 + g] = top[2 + i];
        turned[token + i][16 + g] = bottom[i];
        turned[token + i][24 + g] = bottom[2 + i];
    }
}

// Scale, bias, activation and residual: lane 4i + q does the eight rows of quarter q of a tile, for a token. The small
// operands are read when the tile is opened, long before they are needed.
template <typename T, int kColumns>
class Epilogue {
 public:
    template <int kProjections>
    __device__ Epilogue(MlpArgs<T, kProjections> const& args, int which, int layer, int tile, T* out)
        : around_(args.surroundings[which]),
          rows_(args.program.projections[which].rows),
          row_(tile / kTilesPerGroup * 128 + threadIdx.x % 4 * 32 + tile % kTilesPerGroup * 8),
          alpha_(args.alpha),
          limit_(args.limit),
          out_(out) {
        Projection const& p = args.program.projections[which];
        T const* const bias = static_cast<T const*>(p.bias) + static_cast<int64_t>(layer) * rows_ + row_;
        tensor_scale_ = p.tensor_scale[layer];
        if (rows_ % 8 == 0) {
            if (row_ < rows_) bias_ = *reinterpret_cast<uint4 const*>(bias);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (row_ + i < rows_) reinterpret_cast<T*>(&bias_)[i] = bias[i];
        }
    }

    // `x` is the layer's input.
    __device__ __forceinline__ void write(int token, float const (&sums)[8], T const* x) const {
        float const scale =
            tensor_scale_ * static_cast<float>(1 << Decoder<typename Product<T, kColumns>::Operand>::kScaleShift);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            values[i] = fmaf(sums[i], scale, ptx::to_float(reinterpret_cast<T const*>(&bias_)[i]));
        int const width = around_.gated ? rows_ / 2 : rows_;
        int const count = around_.gated ? 4 : 8;
        int const column = around_.gated ? row_ / 2 : row_;
        int64_t const at = static_cast<int64_t>(token) * width + column;
        if (around_.gated) {
            gate_values(around_.activation, alpha_, limit_, values);
        } else {
            activate_values(around_.activation, values);
        }
        if (around_.residual) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (column + i < width) values[i] += ptx::to_float(__ldcg(x + at + i));
            }
        }
        T rounded[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded[i] = ptx::from_float<T>(values[i]);
        if (width % 4 == 0) {
            Four const* const fours = reinterpret_cast<Four const*>(rounded);
            if (column < width) store_four(out_ + at, fours[0]);
            if (count == 8 && column + 4 < width) store_four(out_ + at + 4, fours[1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count && column + i < width) out_[at + i] = rounded[i];
        }
    }

 private:
    Surroundings<T> const& around_;
    int const rows_, row_;
    float const alpha_, limit_;
    T* const out_;
    float tensor_scale_;
    uint4 bias_ = {};  // eight of T
};

// Eight rows of a tile for a token, finished or published as a part of K.
template <typename T, int kColumns, int kProjections>
__device__ __forceinline__ void finish_rows(MlpArgs<T, kProjections> const& args, Epilogue<T, kColumns> const& epilogue,
                                            WarpTask const& task, int phase, int token, float const (&sums)[8]) {
    Projection const& p = args.program.projections[phase % kProjections];
    if (p.split.splits == 1) {
        epilogue.write(token, sums, Phase<T, kProjections>::input_of(args, phase / kProjections));
        return;
    }
    int64_t const part = static_cast<int64_t>(task.first_tile + task.tile) * p.split.splits + task.split;
    Partial* const parts =
        args.partials[phase % kProjections] + (part * args.m + token) * kTileRows + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) store_partial(parts + i, sums[i], phase);
}

__device__ __forceinline__ void add_rows(float (&sums)[8], Turned const& turned) {
    float const* const rows = &turned[threadIdx.x % 32 / 4][threadIdx.x % 4 * 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += rows[i];
}

// Adds up what the warps of a tile have of eight tokens, in the order of K. The warps whose first tile it is take the
// columns of eight tokens in turn. `next` is of the next tile.
template <typename T, int kColumns, int kProjections>
__device__ __forceinline__ void finish_column(MlpArgs<T, kProjections> const& args,
                                              Epilogue<T, kColumns> const& epilogue, WarpTask const& task, int phase,
                                              int column, float const (&top)[4], float const (&bottom)[4],
                                              float const (&next_top)[4], float const (&next_bottom)[4],
                                              Turned* turned) {
    int const first = task.first_warp(task.tile);
    int const warps = task.first_warp(task.tile + 1) - first;
    bool const alone = task.tiles == kWarps;
    float sums[8] = {};
    if (kSharesWarps<kColumns> && !task.is_whole()) {
        sync_warps();
        turn(next_top, next_bottom, turned[task.warp]);
        sync_warps();
        if (task.tile > 0) add_rows(sums, turned[first - 1]);
    }
    if (!alone) sync_warps();
    __syncwarp();
    turn(top, bottom, turned[task.warp]);
    __syncwarp();
    if (!alone) sync_warps();
    int const token = column * 8 + threadIdx.x % 32 / 4;
    if (column % warps != task.warp - first || token >= args.m) return;
    for (int warp = first; warp < first + warps; ++warp) add_rows(sums, turned[warp]);
    finish_rows(args, epilogue, task, phase, token, sums);
}

// Sums the parts of split tiles in their order, whoever computed them, and finishes them: a token of a tile per warp.
template <typename T, int kColumns, int kProjections>
__device__ void finish_split_tiles(MlpArgs<T, kProjections> const& args, int phase, T* out, Turned& turned) {
    int const which = phase % kProjections;
    Projection const& p = args.program.projections[which];
    int const lane = threadIdx.x % 32;
    int const units = p.tiles() * args.m;
    for (int unit = blockIdx.x + threadIdx.x / 32 * args.blocks; unit < units; unit += kWarps * args.blocks) {
        int const tile = args.by_tokens.of(unit);
        int const token = unit - tile * args.m;
        Epilogue<T, kColumns> const epilogue(args, which, phase / kProjections, tile, out);
        Partial const* const parts =
            args.partials[which] + (static_cast<int64_t>(tile) * p.split.splits * args.m + token) * kTileRows + lane;
        float const sum = add_partials<8>(parts, args.m * kTileRows, p.split.splits, phase);
        __syncwarp();
        turned[0][lane] = sum;
        __syncwarp();
        if (lane >= 4) continue;
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = turned[0][lane * 8 + i];
        epilogue.write(token, sums, Phase<T, kProjections>::input_of(args, phase / kProjections));
    }
}

// Makes a layer's activations sentinels again, a slice per block.
template <typename T>
__device__ void erase(T* activations, int count, int blocks) {
    constexpr uint32_t kSentinel = 0x01010101u * kSentinelByte;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < count / 8; i += blocks * kThreads) {
        store_eight(reinterpret_cast<uint4*>(activations) + i, make_uint4(kSentinel, kSentinel, kSentinel, kSentinel));
    }
}

template <int kColumns>
__device__ __forceinline__ void swap(float (&a)[2][kColumns][4], float (&b)[2][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < 8 * kColumns; ++i) {
        float const of_a = a[i / (4 * kColumns)][i / 4 % kColumns][i % 4];
        a[i / (4 * kColumns)][i / 4 % kColumns][i % 4] = b[i / (4 * kColumns)][i / 4 % kColumns][i % 4];
        b[i / (4 * kColumns)][i / 4 % kColumns][i % 4] = of_a;
    }
}

// Column 1 to the place of column 0, and so on.
template <int kColumns>
__device__ __forceinline__ void shift(float (&acc)[2][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < 8 * (kColumns - 1); ++i) acc[i / 4 % 2][i / 8][i % 4] = acc[i / 4 % 2][i / 8 + 1][i % 4];
}

template <typename T, int kColumns, int kProjections>
__device__ __forceinline__ void multiply_phases(MlpArgs<T, kProjections> const& args, Rings<kWarps> const& rings,
                                                uint8_t* staged_tile, float* rms, Turned* turned) {
    using P = Product<T, kColumns>;
    int const warp = threadIdx.x / 32;
    int const chunk_bytes = P::chunk_bytes(args.m);
    // While the first weights are in flight.
    for (int i = threadIdx.x; i < args.shared.staged_tile_chunks * (chunk_bytes / 16); i += kThreads) {
        reinterpret_cast<uint4*>(staged_tile)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    RingPosition position;
#pragma unroll 1
    for (int phase = args.program.first_phase; phase < args.program.last_phase; ++phase) {
        Phase<T, kProjections> const at(args, phase);
        Projection const& p = at.projection;
        // The caller's x is there, and may hold any NaN.
        Activations<T> from{at.in, phase > 0, args.m, p.k, args.surroundings[at.which].norm_weight, rms};
        if (from.norm_weight != nullptr) {
            from.norm_weight += static_cast<int64_t>(at.layer) * p.k;
            // From memory, while x is awaited.
            for (int i = threadIdx.x * 64; i < p.k; i += kThreads * 64) ptx::prefetch(from.norm_weight + i);
            inverse_rms(from.x, from.awaited, args.m, p.k, args.epsilon, rms);
        }
        if (kProjections > 1 && at.last && at.layer > 1 && blockIdx.x < args.blocks) {
            erase(Phase<T, kProjections>::hidden_of(args, at.layer - 2), at.hidden_size(args), args.blocks);
            if (at.layer > 2) erase(Phase<T, kProjections>::x_of(args, at.layer - 2), at.x_size(args), args.blocks);
        }
        int staged = -1;
#pragma unroll 1
        for (int index = blockIdx.x; index < p.tasks; index += gridDim.x) {
            WarpTask const task(p, index, warp);
            Epilogue<T, kColumns> const epilogue(args, at.which, at.layer, task.first_tile + task.tile, at.out);
            Accumulators<kColumns> acc = {}, next = {};
            for (int begin = task.begin; begin < task.end; begin += args.shared.staged_tile_chunks) {
                int const end = min(begin + args.shared.staged_tile_chunks, task.end);
                if (staged != begin) {
                    sync_warps();
                    stage_activations<T, kColumns>(from, begin, end, staged_tile);
                    staged = begin;
                    if (kProjections > 1 && at.last) fence();
                    sync_warps();
                }
                WarpTask::Part const part = task.part(end - begin);
                auto const multiply_chunks = [&](int first, int count) {
#pragma unroll 1
                    for (int chunk = first; chunk < first + count; ++chunk) {
                        uint8_t const* const stage = rings.acquire(warp, position);
                        multiply<T, kColumns>(stage, staged_tile + chunk * chunk_bytes, args.m, args.one, acc);
                        rings.release(warp, position);
                    }
                };
                if constexpr (kSharesWarps<kColumns>) {
                    // In the program once, for its size.
#pragma unroll 1
                    for (int of = 0; of < 2; ++of) {
                        multiply_chunks(of == 0 ? part.first : 0, of == 0 ? part.of_tile : part.of_next);
                        swap(acc, next);
                    }
                } else {
                    multiply_chunks(part.first, part.of_tile);
                }
                for (int chunk = part.of_tile + part.of_next; chunk < part.most; ++chunk) {
                    rings.acquire(warp, position);
                    rings.release(warp, position);
                }
            }
            // In the program once: unrolled, it would need more registers than there are.
#pragma unroll 1
            for (int column = 0; column < kColumns; ++column) {
                finish_column(args, epilogue, task, phase, column, acc[0][0], acc[1][0], next[0][0], next[1][0],
                              turned);
                shift(acc);
                shift(next);
            }
        }
        if (p.split.splits > 1 && blockIdx.x < args.blocks) {
            sync_warps();  // others may still add up what this warp has turned, and would find parts of split tiles
                           // there
            finish_split_tiles<T, kColumns>(args, phase, at.out, turned[warp]);
        }
    }
}

template <typename T, int kColumns, int kProjections>
__global__ __launch_bounds__(kBlockThreads,
                             1) void sm80_w4a16_mlp(__grid_constant__ MlpArgs<T, kProjections> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t ring_barriers[Rings<kWarps>::kBarriers];
    __shared__ float rms[8 * kColumns];
    __shared__ __align__(16) Turned turned[kWarps];
    int const warp = threadIdx.x / 32;
    Rings<kWarps> const rings(shared, ring_barriers, args.shared.stages);
    if (threadIdx.x % 32 == 0 && warp < kWarps) rings.init(warp);
    __syncthreads();
    if (warp >= kWarps) {
        produce_phases(args, warp - kWarps, rings);
        return;
    }
    // In this order: a kernel that starts early may then read, before its own wait, what ended two launches ago.
    wait_for_kernels_before();
    let_next_kernel_start();
    multiply_phases<T, kColumns>(args, rings, shared + kWarps * args.shared.stages * kStageBytes, rms, turned);
}

}  // namespace trt_nvfp4::w4a16
