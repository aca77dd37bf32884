// One projection of a layer by all blocks: each awaits what it reads, multiplies its tiles of rows by its part of K,
// and publish what becomes of the sums.
#pragma once

#include "decoder/decoder_args.cuh"
#include "decoder/decoder_experts.cuh"
#include "decoder/decoder_tiles.cuh"

namespace trt_nvfp4::decoder {

// Each warp's partial sums of its tile and of the next tile.
template <class Tile>
struct TileSums {
    typename Tile::Sums own[kWarps], next[Tile::kShares ? kWarps : 1];
};

// Shared memory of a launch whose up and down use MlpTile.
template <class Tile, class MlpTile>
struct ProjectionShared {
    static constexpr int kTokens = Tile::kTokens;

    union {
        TileSums<Tile> sums;
        TileSums<MlpTile> mlp_sums;
    };
    float squares[kMostTokens], rms[kMostTokens];
    w4a16::RingPosition positions[kWarps];  // between projections
    std::conditional_t<MlpTile::kExperts, Choice, NoChoice> choices[kTokens];
};

// The tokens of a phase: only one where a tile holds one token.
template <class Tile, typename T>
__device__ __forceinline__ int tokens_of(DecoderArgs<T> const& args) {
    return Tile::kTokens == 1 ? 1 : args.m;
}

// What becomes of a row of a tile, a lane each. What does not depend on products is read when the tile is opened.
template <class Tile, typename T>
class Epilogue {
 public:
    template <class Shared>
    __device__ __forceinline__ Epilogue(DecoderArgs<T> const& args, w4a16::Step const& step, int tile,
                                        Shared const& shared)
        : args_(args), which_(step.which), layer_(step.layer), first_token_(step.token) {
        w4a16::Projection const& p = args.program.projections[which_];
        int const lane = threadIdx.x % 32;
        row_ = tile / w4a16::kTilesPerGroup * 128 + lane / 8 * 32 + tile % w4a16::kTilesPerGroup * 8 + lane % 8;
        rows_ = p.rows;
        if constexpr (Tile::kExperts) {
            if (which_ == kUp || which_ == kDown) {
                read_experts(p, shared.choices[first_token_]);
                return;
            }
        }
        tensor_scale_ = p.tensor_scale[layer_];
        if (row_ < rows_) bias_ = bias_of(p, layer_, rows_, row_);
    }

    // The residual of one of the phase's tokens; loaded early, since it is a trip to L2.
    __device__ __forceinline__ float residual(int token) const {
        if ((which_ != kOutput && which_ != kDown) || row_ >= rows_) return 0.0f;
        uint32_t const* const words = which_ == kOutput ? args_.input : args_.middle;
        return ptx::to_float(w4a16::load_tagged<T>(words + (first_token_ + token) * rows_ + row_, layer_));
    }

    // By a whole warp.
    __device__ __forceinline__ void write(int token, float sum, float residual) const {
        float const scale = tensor_scale_ * static_cast<float>(1 << Tile::kShift);
        float value = fmaf(sum, scale, bias_) + residual;
        bool mine = row_ < rows_;
        int at = (first_token_ + token) * rows_ + row_;
        if (which_ == kUp) {
            // Rows 2 i and 2 i + 1 are gate and up.
            float const up = __shfl_xor_sync(0xffffffffu, value, 1);
            value = gate_one(args_.surroundings[kUp].activation, args_.alpha, args_.limit, value, up);
            if constexpr (Tile::kExperts) value *= factor_;
            mine = mine && row_ % 2 == 0;
            at /= 2;
        }
        if (!mine) return;
        T const rounded = ptx::from_float<T>(value);
        if (which_ != kDown) {
            uint32_t* const words = which_ == kQkv ? args_.qkv : which_ == kOutput ? args_.middle : args_.hidden;
            w4a16::store_tagged(words + at, rounded, layer_);
        } else if (layer_ + 1 < args_.layers) {
            w4a16::store_tagged(args_.input + at, rounded, layer_ + 1);
        } else {
            args_.y[at] = rounded;
        }
    }

 private:
    __device__ __forceinline__ float bias_of(w4a16::Projection const& p, int matrix, int rows, int row) const {
        return ptx::to_float(static_cast<T const*>(p.bias)[int64_t{matrix} * rows + row]);
    }

    // Scales and bias of a chosen expert's row, or of a sum over all of them.
    __device__ __forceinline__ void read_experts(w4a16::Projection const& p, Choice const& choice) {
        Experts<T> const& of = args_.experts;
        int const first = layer_ * of.count;
        if (which_ == kUp) {
            int const slot = row_ / of.rows(), expert = first + choice.experts[slot];
            tensor_scale_ = p.tensor_scale[expert];
            bias_ = bias_of(p, expert, of.rows(), row_ - slot * of.rows());
            factor_ = choice.factors[slot];
            return;
        }
        tensor_scale_ = choice.scale;
        if (row_ >= rows_) return;
#pragma unroll 1
        for (int slot = 0; slot < of.chosen; ++slot) {
            bias_ += choice.weights[slot] * bias_of(p, first + choice.experts[slot], rows_, row_);
        }
    }

    DecoderArgs<T> const& args_;
    int const which_, layer_, first_token_;
    int row_, rows_;
    float tensor_scale_;
    float bias_ = 0.0f;
    float factor_ = 1.0f;  // of an expert's hidden values
};

template <class Tile, typename T>
__device__ __forceinline__ Words<T> words_of(DecoderArgs<T> const& args, w4a16::Step const& step) {
    int const which = step.which;
    uint32_t const* const words = which == kQkv      ? args.input
                                  : which == kOutput ? args.attended
                                  : which == kUp     ? args.middle
                                                     : args.hidden;
    int const k = args.program.projections[which].k;
    T const* norm = args.surroundings[which].norm_weight;
    if (norm != nullptr) norm += int64_t{step.layer} * k;
    return {words + step.token * k, step.layer, tokens_of<Tile>(args), k, norm, args.by_tokens};
}

// A phase's parts of split tiles, [tiles, splits, tokens, kTileRows].
template <typename T>
__device__ __forceinline__ w4a16::Partial* partials_of(DecoderArgs<T> const& args, w4a16::Step const& step) {
    w4a16::Projection const& p = args.program.projections[step.which];
    return args.partials[step.which] + int64_t{step.token} * p.tiles() * p.split.splits * w4a16::kTileRows;
}

// Sums the parts of split tiles in their order, whoever computed them: a tile's token per warp.
template <class Tile, typename T, class Shared>
__device__ __forceinline__ void finish_split_tiles(DecoderArgs<T> const& args, int phase, w4a16::Step const& step,
                                                   Shared const& shared) {
    w4a16::Projection const& p = args.program.projections[step.which];
    int const m = tokens_of<Tile>(args), units = p.tiles() * m;
#pragma unroll 1
    for (int unit = blockIdx.x + threadIdx.x / 32 * args.blocks; unit < units; unit += kWarps * args.blocks) {
        int const tile = Tile::kTokens == 1 ? unit : args.by_tokens.of(unit);
        int const token = unit - tile * m;
        Epilogue<Tile, T> const epilogue(args, step, tile, shared);
        float const residual = epilogue.residual(token);
        w4a16::Partial const* const parts = partials_of(args, step) +
                                            (int64_t{tile} * p.split.splits * m + token) * w4a16::kTileRows +
                                            threadIdx.x % 32;
        epilogue.write(token, w4a16::add_partials<4>(parts, m * w4a16::kTileRows, p.split.splits, phase), residual);
    }
}

// Adds up what the warps of a tile have of it, in the order of K; they take the tokens in turn.
template <class Tile, typename T, class Shared>
__device__ __forceinline__ void finish_tile(DecoderArgs<T> const& args, Tile& products, Epilogue<Tile, T> const& early,
                                            float early_residual, int index, int phase, w4a16::Step const& step,
                                            TileSums<Tile>& sums, Shared const& shared) {
    w4a16::Projection const& p = args.program.projections[step.which];
    int const lane = threadIdx.x % 32, m = tokens_of<Tile>(args);
    // Found anew, so that products have the registers.
    asm volatile("" : "+r"(index));
    w4a16::WarpTask const task(p, index, threadIdx.x / 32);
    w4a16::Sharers const sharers(task);
    // With several tokens also the values read early.
    int const tile = task.first_tile + task.tile;
    Epilogue<Tile, T> const epilogue = Tile::kTokens == 1 ? early : Epilogue<Tile, T>(args, step, tile, shared);
#pragma unroll 1
    for (int column = 0; column < Tile::kColumns; ++column) {
        w4a16::sync_warps();  // others may still add up what is here
        products.take_column(sums.own[task.warp], sums.next[Tile::kShares ? task.warp : 0]);
        w4a16::sync_warps();
        int const end = min(m, column * 8 + 8);
#pragma unroll 1
        for (int token = column * 8 + task.warp - sharers.first; token < end; token += sharers.end - sharers.first) {
            float const residual = Tile::kTokens == 1    ? early_residual
                                   : p.split.splits == 1 ? epilogue.residual(token)
                                                         : 0.0f;
            float sum = Tile::kShares && sharers.before != 0 ? sums.next[sharers.first - 1][token % 8][lane] : 0.0f;
            for (int warp = sharers.first; warp < sharers.end; ++warp) sum += sums.own[warp][token % 8][lane];
            if (p.split.splits == 1) {
                epilogue.write(token, sum, residual);
            } else {
                int64_t const part = int64_t{tile} * p.split.splits + task.split;
                w4a16::store_partial(partials_of(args, step) + (part * m + token) * w4a16::kTileRows + lane, sum,
                                     phase);
            }
        }
    }
}

template <class Tile, typename T, class Shared>
__device__ __forceinline__ void project(DecoderArgs<T> const& args, int phase, w4a16::Step const& step,
                                        w4a16::Rings<kWarps> const& rings, uint8_t* staged_tile, TileSums<Tile>& sums,
                                        Shared& shared, [[maybe_unused]] uint32_t chosen) {
    int const warp = threadIdx.x / 32;
    int const m = tokens_of<Tile>(args), chunk_bytes = Tile::chunk_bytes(m);
    w4a16::Projection const& p = args.program.projections[step.which];
    Words<T> const from = words_of<Tile>(args, step);
    // Not in blocks without a task: nobody waits for these, so what they read might be gone.
    int staged = -1;
    bool scaled = false;  // the router had the norm
    if constexpr (Tile::kExperts) {
        if (step.which == kUp) {
            if (step.token == 0) route(args, from, shared, chosen);
            scaled = true;
        }
    }
    if (from.norm_weight != nullptr && !scaled && static_cast<int>(blockIdx.x) < p.tasks) {
        prefetch_norm(from);
        bool together = false;
        if constexpr (Tile::kTokens == 1) {
            together = p.split.splits == 1 && p.chunks() <= min(args.shared.staged_tile_chunks, Tile::kHeldChunks);
            if (together) {
                w4a16::sync_warps();  // others may still multiply what is in the staged tile
                Tile::stage_normalized(from, args.epsilon, shared.squares, p.chunks(), staged_tile);
                w4a16::sync_warps();
                staged = 0;
            }
        }
        if (!together) inverse_rms(from, args.epsilon, shared.squares, shared.rms);
    }
    w4a16::RingPosition position = shared.positions[warp];
#pragma unroll 1
    for (int index = blockIdx.x; index < p.tasks; index += gridDim.x) {
        int of_task = warp;
        // Two tiles' kinds in one kernel: what follows from it is made anew, instead of being kept in registers.
        if constexpr (Shared::kTokens > 1) asm volatile("" : "+r"(of_task));
        w4a16::WarpTask const task(p, index, of_task);
        Epilogue<Tile, T> const early(args, step, task.first_tile + task.tile, shared);
        // It is there: all of it came before what is awaited now.
        float const residual = Tile::kTokens == 1 ? early.residual(0) : 0.0f;
        Tile products;
        for (int begin = task.begin; begin < task.end; begin += args.shared.staged_tile_chunks) {
            int const end = min(begin + args.shared.staged_tile_chunks, task.end);
            if (staged != begin) {
                w4a16::sync_warps();
                Tile::stage(from, shared.rms + step.token, begin, end, staged_tile);
                staged = begin;
                w4a16::sync_warps();
            }
            w4a16::WarpTask::Part const part = task.part(end - begin);
            auto const multiply_chunks = [&](int first, int count) {
#pragma unroll 1
                for (int chunk = first; chunk < first + count; ++chunk) {
                    uint8_t const* const stage = rings.acquire(warp, position);
                    products.multiply(stage, staged_tile + chunk * chunk_bytes, m, args.one);
                    rings.release(warp, position);
                }
            };
            if constexpr (Tile::kShares) {
                // In the program once, for its size.
#pragma unroll 1
                for (int of = 0; of < 2; ++of) {
                    multiply_chunks(of == 0 ? part.first : 0, of == 0 ? part.of_tile : part.of_next);
                    products.swap();
                }
            } else {
                multiply_chunks(part.first, part.of_tile);
            }
            for (int chunk = part.of_tile + part.of_next; chunk < part.most; ++chunk) {
                rings.acquire(warp, position);
                rings.release(warp, position);
            }
        }
        finish_tile(args, products, early, residual, index, phase, step, sums, shared);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.positions[warp] = position;
    __syncwarp();
    if (p.split.splits == 1 || static_cast<int>(blockIdx.x) >= args.blocks) return;
    if constexpr (!Tile::kExperts) {
        finish_split_tiles<Tile>(args, phase, step, shared);
    } else {
        // Where tokens take turns, those of the one before, which are there by now.
        bool const last = step.which < kUp || step.token + 1 == args.turns;
#pragma unroll 1
        for (int back = step.token > 0; back >= static_cast<int>(!last); --back) {
            finish_split_tiles<Tile>(args, phase - back, {step.which, step.layer, step.token - back}, shared);
        }
    }
}

}  // namespace trt_nvfp4::decoder
