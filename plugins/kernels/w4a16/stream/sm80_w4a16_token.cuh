// y = MLP layers of one token, or one linear. As sm80_w4a16_mlp.cuh, but there are no columns of tokens: FP16 lanes
// multiply unscaled codes and sum the products of a chunk, which scales multiply block by block. That takes fewer
// clocks than products on the tensor cores, and a GPU that uses none of these runs at a higher clock
// (benchmarks/notes).
//
// A lane finishes one row of a tile. Blocks exchange tagged words (exchange/tagged_words.cuh): nothing is erased and no
// fence keeps an order.
//
//     buffer      writer                     readers            what must precede an overwrite
//     between[0]  down of l - 1, tag l       up, residual of l  a value of x(l + 1) needs all of hidden(l), whose
//     blocks
//                                                               have read x(l)
//     between[1]  up of l, tag l             down of l          a value of hidden(l + 1) needs all of x(l + 1), whose
//                                                               blocks have read hidden(l)
//     partials    tasks of a split phase     all blocks, same   the phase in the word; the next use is a layer later,
//                                            phase              and needs all of this layer's output
//     y           down of the last layer     the caller         the launch ends
#pragma once

#include "common/programmatic_launch.cuh"
#include "common/smooth_activation.cuh"
#include "exchange/tagged_words.cuh"
#include "formats/half_scale.cuh"
#include "w4a16/stream/sm80_w4a16_phases.cuh"
#include "w4a16/stream/sm80_w4a16_staging.cuh"

namespace trt_nvfp4::w4a16 {

// A chunk of the staged tile: values as FP16, 16 bytes for each word of a lane's codes, and the factor that makes them
// right.
constexpr int kTokenFactor = kChunk * 2;
constexpr int kTokenChunkBytes = kTokenFactor + 16;

// sums[q] += this lane's part of row lane / 4 of quarter q of a warp's tile times a chunk.
__device__ __forceinline__ void multiply_token(uint8_t const* stage, uint8_t const* chunk, uint32_t one,
                                               float (&sums)[4]) {
    using Half = Decoder<__half>;
    int const lane = threadIdx.x % 32;
    int const g = lane / 4;
    int const t = lane % 4;
    uint4 const scales = *reinterpret_cast<uint4 const*>(stage + kCodeBytes + t * 128 + (g ^ (t * 2)) * 16);
    uint32_t const row_scales[4] = {scales.x, scales.y, scales.z, scales.w};
    uint32_t of_chunk[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 codes[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            codes[row] =
                *reinterpret_cast<uint4 const*>(stage + (row * 8 + g) * (kChunk / 2) + ((2 * t + half) ^ (g & 1)) * 16);
        }
        uint32_t of_block[2][4] = {};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            uint4 const x = *reinterpret_cast<uint4 const*>(chunk + ((half * 4 + word) * 4 + t) * 16);
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                uint4 const& c = codes[row];
                uint32_t& sum = of_block[word / 2][row];
                sum = add_products(word == 0 ? c.x : word == 1 ? c.y : word == 2 ? c.z : c.w, one, x, sum);
            }
        }
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            uint32_t const both = Half::sum_scales(row_scales[row] >> half * 16, one);
            of_chunk[row] = multiply_add_by_half<0>(of_block[0][row], both, of_chunk[row]);
            of_chunk[row] = multiply_add_by_half<1>(of_block[1][row], both, of_chunk[row]);
        }
    }
    float const factor = *reinterpret_cast<float const*>(chunk + kTokenFactor);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(add_halves(of_chunk[i]), factor, sums[i]);
}

template <typename T, int kProjections>
struct TokenArgs : PhasesArgs<T, kProjections> {
    // Words that each projection reads from other blocks: x of layers from 1 on, and hidden.
    uint32_t* between[2];
};

// A phase's activations. Those of linears are the caller's.
template <typename T, bool kLinear>
struct TokenInput {
    T const* x;              // [k], the caller's, or null:
    uint32_t const* tagged;  // [k], of `layer`
    int layer, k;
    T const* norm_weight;  // [k], or null
    float inverse_rms;

    // By a whole warp. Calls f(i, eight) for kCount times eight values as they appear, from offset(i) on; zeros from
    // K's end on.
    template <int kCount, typename Offset, typename F>
    __device__ __forceinline__ void read(Offset&& offset, F&& f) const {
        if (kLinear || x != nullptr) {
            uint4 eights[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                eights[i] = make_uint4(0u, 0u, 0u, 0u);
                if (offset(i) < k) eights[i] = load_eight(x + offset(i));
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) f(i, eights[i]);
            return;
        }
        if constexpr (kLinear) return;
        // Zeroed: values loaded only under a condition would be kept in registers around a loop.
        TaggedEight eights[kCount] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (offset(i) < k) eights[i].load(tagged + offset(i));
        }
        // Late ones all at once: a trip to L2 for each would add up.
        while (true) {
            bool late[kCount], any = false;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                late[i] = offset(i) < k && !eights[i].is_of(layer);
                any |= late[i];
            }
            if (!any) break;
            __nanosleep(kPollPause);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (late[i]) eights[i].load(tagged + offset(i));
            }
        }
        // Lanes that saw their values at different times would go on one after another.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kCount; ++i) f(i, offset(i) < k ? eights[i].values() : make_uint4(0u, 0u, 0u, 0u));
    }
};

// By all consumer warps. `squares` has a place for each of them.
template <typename T, bool kLinear>
__device__ __forceinline__ float inverse_rms(TokenInput<T, kLinear> const& from, float epsilon, float* squares) {
    float sum = 0.0f;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * kChunk; first < from.k; first += kWarps * kChunk) {
        from.template read<1>([&](int) { return first + static_cast<int>(threadIdx.x % 32 * 8); },
                              [&](int, uint4 eight) {
                                  T const* const values = reinterpret_cast<T const*>(&eight);
#pragma unroll
                                  for (int j = 0; j < 8; ++j) {
                                      sum = fmaf(ptx::to_float(values[j]), ptx::to_float(values[j]), sum);
                                  }
                              });
    }
    sum = ptx::warp_sum(sum);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    sync_warps();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += squares[i];
    return 1.0f / sqrtf(sum / static_cast<float>(from.k) + epsilon);
}

// Chunks [begin, end) to the staged tile as they appear, each by a warp, which asks for kBatch at a time.
template <int kBatch, typename T, bool kLinear>
__device__ __forceinline__ void stage_token(TokenInput<T, kLinear> const& from, int begin, int end,
                                            uint8_t* staged_tile) {
    int const lane = threadIdx.x % 32;
    int const t = lane / 2 % 4;
    int const word = lane / 8 * 2 + lane % 2;
#pragma unroll 1
    for (int first = begin + threadIdx.x / 32; first < end; first += kWarps * kBatch) {
        auto const chunk = [&](int i) { return first + i * kWarps; };
        auto const offset = [&](int i) { return chunk(i) < end ? chunk(i) * kChunk + t * 64 + word * 8 : from.k; };
        from.template read<kBatch>(offset, [&](int i, uint4 eight) {
            if (from.norm_weight != nullptr && offset(i) < from.k) {
                eight = normalize(eight, from.norm_weight + offset(i), from.inverse_rms);
            }
            HalfScale const scale(ptx::warp_max(greatest_of<T>(eight)), Decoder<__half>::kSumExponent);
            // What lies beyond the last chunk was computed too, of zeros: no branch parts the chunks' instructions.
            if (chunk(i) >= end) return;
            uint8_t* const place = staged_tile + (chunk(i) - begin) * kTokenChunkBytes;
            *reinterpret_cast<uint4*>(place + (word * 4 + t) * 16) = pair_activations<__half>(scale.of<T>(eight));
            if (lane == 0) *reinterpret_cast<float*>(place + kTokenFactor) = scale.factor();
        });
    }
}

// A row of a tile for each lane: lane / 4 of quarter lane % 4. What it needs besides the sum is read when the tile is
// opened, long before.
template <typename T, int kProjections>
class TokenEpilogue {
 public:
    __device__ __forceinline__ TokenEpilogue(TokenArgs<T, kProjections> const& args, int which, int layer, int tile)
        : args_(args),
          which_(which),
          layer_(layer),
          activation_(args.surroundings[which].activation),
          gated_(args.surroundings[which].gated),
          residual_(args.surroundings[which].residual),
          row_(tile / kTilesPerGroup * 128 + threadIdx.x % 4 * 32 + tile % kTilesPerGroup * 8 + threadIdx.x % 32 / 4) {
        Projection const& p = args.program.projections[which];
        tensor_scale_ = p.tensor_scale[layer];
        if (row_ < p.rows) bias_ = static_cast<T const*>(p.bias)[static_cast<int64_t>(layer) * p.rows + row_];
    }

    // By a whole warp.
    __device__ __forceinline__ void write(float sum) const {
        float const scale = tensor_scale_ * static_cast<float>(1 << Decoder<__half>::kSumShift);
        float value = fmaf(sum, scale, ptx::to_float(bias_));
        bool mine = row_ < args_.program.projections[which_].rows;
        int column = row_;
        if (gated_) {
            // Rows 2 i and 2 i + 1 are gate and up.
            float const up = __shfl_xor_sync(0xffffffffu, value, 4);
            value = gate_one(activation_, args_.alpha, args_.limit, value, up);
            mine = mine && row_ % 2 == 0;
            column /= 2;
        } else {
            value = activate_one(activation_, value);
        }
        if (!mine) return;
        if (residual_) {
            value += ptx::to_float(layer_ == 0 ? args_.x[column] : load_tagged<T>(args_.between[0] + column, layer_));
        }
        T const rounded = ptx::from_float<T>(value);
        if (which_ < kProjections - 1) {
            store_tagged(args_.between[1] + column, rounded, layer_);
        } else if (layer_ + 1 < args_.layers) {
            store_tagged(args_.between[0] + column, rounded, layer_ + 1);
        } else {
            args_.y[column] = rounded;
        }
    }

 private:
    TokenArgs<T, kProjections> const& args_;
    int const which_, layer_;
    TrtNvfp4Activation const activation_;
    bool const gated_, residual_;
    int const row_;
    float tensor_scale_;
    T bias_ = ptx::from_float<T>(0.0f);
};

// The sum of lane t's row, of a row's four lanes, that these have parts of. By a whole warp.
__device__ __forceinline__ float own_row(float const (&sums)[4]) {
    bool const odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
    float rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float const other = __shfl_xor_sync(0xffffffffu, odd ? sums[2 * i] : sums[2 * i + 1], 1);
        rows[i] = (odd ? sums[2 * i + 1] : sums[2 * i]) + other;
    }
    return (upper ? rows[1] : rows[0]) + __shfl_xor_sync(0xffffffffu, upper ? rows[0] : rows[1], 2);
}

// What warps have of their tile's rows and of the next one's. Tasks take turns with two of them: who reads may be a
// task behind.
struct TokenSums {
    float rows[2][kWarps][kTileRows];
};

// The warps that have parts of a warp's tile.
struct Sharers {
    int first, end;  // whose first tile it is
    int before;      // whether the warp before them has some too
    __device__ __forceinline__ explicit Sharers(WarpTask const& task)
        : first(task.first_warp(task.tile)),
          end(task.first_warp(task.tile + 1)),
          before(task.tile > 0 && !task.is_whole()) {
        // Now: behind the products these divisions would be waited for.
        asm volatile("" : "+r"(first), "+r"(end), "+r"(before));
    }

    // In the order of K.
    __device__ __forceinline__ float sum(TokenSums const& sums) const {
        int const lane = threadIdx.x % 32;
        float sum = before != 0 ? sums.rows[1][first - 1][lane] : 0.0f;
        for (int warp = first; warp < end; ++warp) sum += sums.rows[0][warp][lane];
        return sum;
    }
};

// Sums the parts of split tiles in their order, whoever computed them: a tile per warp.
template <typename T, int kProjections>
__device__ __forceinline__ void finish_split_tiles(TokenArgs<T, kProjections> const& args, int phase) {
    int const which = phase % kProjections;
    Projection const& p = args.program.projections[which];
    for (int tile = blockIdx.x + threadIdx.x / 32 * args.blocks; tile < p.tiles(); tile += kWarps * args.blocks) {
        TokenEpilogue<T, kProjections> const epilogue(args, which, phase / kProjections, tile);
        Partial const* const parts =
            args.partials[which] + static_cast<int64_t>(tile) * p.split.splits * kTileRows + threadIdx.x % 32;
        epilogue.write(add_partials<4>(parts, kTileRows, p.split.splits, phase));
    }
}

template <typename T, int kProjections>
__device__ __forceinline__ void multiply_phases(TokenArgs<T, kProjections> const& args, Rings<kWarps> const& rings,
                                                uint8_t* staged_tile, TokenSums (&shared_sums)[2], float* squares) {
    int const warp = threadIdx.x / 32;
    RingPosition position;
    int turn = 0;
#pragma unroll 1
    for (int phase = args.program.first_phase; phase < args.program.last_phase; ++phase) {
        int const which = phase % kProjections;
        int const layer = phase / kProjections;
        Projection const& p = args.program.projections[which];
        TokenInput<T, kProjections == 1> from{
            phase == 0 ? args.x : nullptr, args.between[which], layer, p.k, args.surroundings[which].norm_weight, 0.0f};
        // Not in blocks without a task: nobody waits for these, so what they read might be gone.
        if (from.norm_weight != nullptr && static_cast<int>(blockIdx.x) < p.tasks) {
            from.norm_weight += static_cast<int64_t>(layer) * p.k;
            from.inverse_rms = inverse_rms(from, args.epsilon, squares);
        }
        int staged = -1;
#pragma unroll 1
        for (int index = blockIdx.x; index < p.tasks; index += gridDim.x) {
            WarpTask const task(p, index, warp);
            Sharers const sharers(task);
            TokenEpilogue<T, kProjections> const epilogue(args, which, layer, task.first_tile + task.tile);
            float sums[4] = {}, next[4] = {};
            for (int begin = task.begin; begin < task.end; begin += args.shared.staged_tile_chunks) {
                int const end = min(begin + args.shared.staged_tile_chunks, task.end);
                if (staged != begin) {
                    sync_warps();
                    stage_token<kProjections == 1 ? 4 : 2>(from, begin, end, staged_tile);
                    staged = begin;
                    sync_warps();
                }
                WarpTask::Part const part = task.part(end - begin);
                // In the program once, for its size.
#pragma unroll 1
                for (int of = 0; of < 2; ++of) {
                    int const first = of == 0 ? part.first : 0;
                    int const behind = first + (of == 0 ? part.of_tile : part.of_next);
#pragma unroll 1
                    for (int chunk = first; chunk < behind; ++chunk) {
                        uint8_t const* const stage = rings.acquire(warp, position);
                        multiply_token(stage, staged_tile + chunk * kTokenChunkBytes, args.one, sums);
                        rings.release(warp, position);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float const of_tile = sums[i];
                        sums[i] = next[i];
                        next[i] = of_tile;
                    }
                }
                for (int chunk = part.of_tile + part.of_next; chunk < part.most; ++chunk) {
                    rings.acquire(warp, position);
                    rings.release(warp, position);
                }
            }
            float sum = own_row(sums);
            if (task.tiles < kWarps) {
                shared_sums[turn].rows[0][warp][threadIdx.x % 32] = sum;
                shared_sums[turn].rows[1][warp][threadIdx.x % 32] = own_row(next);
                sync_warps();
                turn ^= 1;
            }
            if (warp != sharers.first) continue;
            if (task.tiles < kWarps) sum = sharers.sum(shared_sums[turn ^ 1]);
            if (p.split.splits == 1) {
                epilogue.write(sum);
                continue;
            }
            int64_t const part = static_cast<int64_t>(task.first_tile + task.tile) * p.split.splits + task.split;
            store_partial(args.partials[which] + part * kTileRows + threadIdx.x % 32, sum, phase);
        }
        if (p.split.splits > 1 && static_cast<int>(blockIdx.x) < args.blocks) finish_split_tiles(args, phase);
    }
}

template <typename T, int kProjections>
__global__ __launch_bounds__(kBlockThreads,
                             1) void sm80_w4a16_token(__grid_constant__ TokenArgs<T, kProjections> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t token_bytes[];
    __shared__ uint64_t ring_barriers[Rings<kWarps>::kBarriers];
    __shared__ TokenSums sums[2];
    __shared__ float squares[kWarps];
    int const warp = threadIdx.x / 32;
    Rings<kWarps> const rings(token_bytes, ring_barriers, args.shared.stages);
    if (threadIdx.x % 32 == 0 && warp < kWarps) rings.init(warp);
    __syncthreads();
    if (warp >= kWarps) {
        produce_phases(args, warp - kWarps, rings);
        return;
    }
    // In this order: a kernel that starts early may then read, before its own wait, what ended two launches ago.
    wait_for_kernels_before();
    let_next_kernel_start();
    multiply_phases(args, rings, token_bytes + kWarps * args.shared.stages * kStageBytes, sums, squares);
}

}  // namespace trt_nvfp4::w4a16
