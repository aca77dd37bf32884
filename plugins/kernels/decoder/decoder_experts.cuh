// A layer's mixture of experts, in a launch for all layers.
//
// Blocks score experts by turns, and hand each other the logits; then every block chooses by itself, all the same. A
// token's chosen experts are one MLP: their gates and ups, one behind the other, are its rows, and so its hidden values
// are K of down, whose tiles run through the chosen experts' weights. What an expert weighs, and the tensor scale of
// its down, goes into its hidden values. Weights of experts cannot be in flight before the choice.
//
// Tokens take turns, first with up, then with down: their experts are few of many, seldom the same, and no block waits
// between one token's tiles and the next one's.
#pragma once

#include "decoder/decoder_args.cuh"
#include "decoder/decoder_tiles.cuh"
#include "moe/moe_routing.cuh"

namespace trt_nvfp4::decoder {

// A token's, for which weights come from chosen experts.
template <typename T>
class ExpertTile : public TokenTile<T> {
 public:
    static constexpr bool kExperts = true;
};

// From the end of an expert's part of a row of down to the next one's begin.
struct Jump {
    int64_t codes, scales;
    int chunks;
};

// What a layer's router chose for a token; in shared memory.
struct Choice {
    Jump jumps[kMostChosen];
    int experts[kMostChosen];
    float factors[kMostChosen];  // scale of the expert's hidden values, magnitude at most 1
    float weights[kMostChosen];
    float scale;  // of down's sums
};
struct NoChoice {};

// The weights of a phase, as w4a16::produce_phases asks for them.
template <typename T>
struct ExpertWeights {
    DecoderArgs<T> const& args;
    Choice const* choices;  // of tokens
    uint32_t chosen;        // barrier

    // A tile's chunks, which of down belong to one expert after another.
    class Copies : public w4a16::TileCopies {
     public:
        __device__ __forceinline__ Copies() = default;
        __device__ __forceinline__ Copies(w4a16::TilePlace const& place, bool whole_chunks, int left, Jump const* next)
            : TileCopies(place, whole_chunks), left_(left), next_(next) {}

        __device__ __forceinline__ bool copy(uint32_t stage) {
            if (!TileCopies::copy(stage)) return false;
            if (--left_ == 0) {
                left_ = next_->chunks;
                jump(next_->codes, next_->scales);
                ++next_;
            }
            return true;
        }

     private:
        int left_;  // chunks of this expert
        Jump const* next_;
    };

    template <int>
    __device__ __forceinline__ w4a16::Step step(int phase) const {
        return args.step(phase);
    }
    // By blocks that have a task, so that a layer's choice is not overtaken by the next one's.
    __device__ __forceinline__ void await(w4a16::Step const& step) const {
        if (step.which == kUp || step.which == kDown) ptx::mbarrier_wait(chosen, step.layer & 1);
    }
    __device__ __forceinline__ Copies copies(w4a16::Projection const& p, w4a16::Step const& step, int tile, int begin,
                                             int end) const {
        Experts<T> const& of = args.experts;
        Choice const& choice = choices[step.token];
        int const which = step.which, layer = step.layer;
        w4a16::TilePlace place{p.codes, p.scales, p.rows, p.k, tile, begin, end, 1};
        int matrix = layer, skipped = 0, left = -1;
        if (which == kUp) {
            int const slot = tile / of.tiles();
            matrix = layer * of.count + choice.experts[slot];
            place.rows = of.rows();
            place.tile -= slot * of.tiles();
        } else if (which == kDown) {
            int const slot = begin / of.chunks();
            matrix = layer * of.count + choice.experts[slot];
            skipped = slot * of.chunks();
            left = skipped + of.chunks() - begin;
            place.k = of.intermediate;
        }
        place.begin -= skipped;
        place.end -= skipped;
        place.codes += matrix * p.codes_per_layer;
        place.scales += matrix * p.scales_per_layer;
        return Copies(place, which == kDown, left, choice.jumps + (which == kDown ? skipped / of.chunks() : 0));
    }
};

template <typename T>
__device__ __forceinline__ T const* router_row(DecoderArgs<T> const& args, Words<T> const& from, int expert) {
    return args.experts.router + (int64_t{from.layer} * args.experts.count + expert) * from.k;
}

// What eight values add to a sum of squares, or of products.
template <typename T>
__device__ __forceinline__ float add_eight(uint4 a, uint4 b, float sum) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sum = fmaf(ptx::to_float(reinterpret_cast<T const*>(&a)[j]), ptx::to_float(reinterpret_cast<T const*>(&b)[j]),
                   sum);
    }
    return sum;
}

// The only token's logits of the experts that are this block's, by all consumer warps.
template <typename T>
__device__ __forceinline__ void score_token(DecoderArgs<T> const& args, Words<T> const& from, float* squares,
                                            float* rms) {
    Experts<T> const& of = args.experts;
    constexpr int kHeld = kMostScored / (8 * w4a16::kThreads);
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto const offset = [&](int i) { return (i * w4a16::kThreads + static_cast<int>(threadIdx.x)) * 8; };
    w4a16::TokenInput<T, false> const row{nullptr, from.words, from.layer, from.k, nullptr, 0.0f};
    uint4 held[kHeld];
    float sum = 0.0f;
    // One after another: two at once spill on SM120.
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        row.template read<1>([&](int) { return offset(i); },
                             [&](int, uint4 eight) {
                                 held[i] = eight;
                                 sum = add_eight<T>(eight, eight, sum);
                             });
    }
    auto const sum_up = [&](float part) {
        part = ptx::warp_sum(part);
        w4a16::sync_warps();  // others may still read
        if (lane == 0) squares[warp] = part;
        w4a16::sync_warps();
        part = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) part += squares[i];
        return part;
    };
    float const inverse = 1.0f / sqrtf(sum_up(sum) / static_cast<float>(from.k) + args.epsilon);
    if (threadIdx.x == 0) rms[0] = inverse;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        if (offset(i) < from.k) held[i] = w4a16::normalize(held[i], from.norm_weight + offset(i), inverse);
    }
#pragma unroll 1
    for (int expert = blockIdx.x; expert < of.count; expert += gridDim.x) {
        T const* const weights = router_row(args, from, expert);
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (offset(i) >= from.k) continue;
            logit = add_eight<T>(held[i], *reinterpret_cast<uint4 const*>(weights + offset(i)), logit);
        }
        logit = sum_up(logit);
        if (threadIdx.x == 0) w4a16::store_partial(of.logits + expert, logit, from.layer);
    }
}

// The same of several tokens, `from` being the first one's: a warp each.
template <typename T>
__device__ __forceinline__ void score_tokens(DecoderArgs<T> const& args, Words<T> const& from, float* rms) {
    Experts<T> const& of = args.experts;
    constexpr int kBatch = 2;
    int const lane = threadIdx.x % 32;
    w4a16::sync_warps();  // others may still read what the layer before left
#pragma unroll 1
    for (int token = threadIdx.x / 32; token < args.m; token += kWarps) {
        w4a16::TokenInput<T, false> const row{nullptr, from.words + token * from.k, from.layer, from.k, nullptr, 0.0f};
        auto const for_eights = [&](auto&& f) {
#pragma unroll 1
            for (int first = 0; first < from.k; first += kBatch * 256) {
                auto const offset = [&](int i) { return first + i * 256 + lane * 8; };
                row.template read<kBatch>(offset, [&](int i, uint4 eight) { f(offset(i), eight); });
            }
        };
        float sum = 0.0f;
        for_eights([&](int, uint4 eight) { sum = add_eight<T>(eight, eight, sum); });
        float const inverse = 1.0f / sqrtf(ptx::warp_sum(sum) / static_cast<float>(from.k) + args.epsilon);
        if (lane == 0) rms[token] = inverse;
#pragma unroll 1
        for (int expert = blockIdx.x; expert < of.count; expert += gridDim.x) {
            T const* const weights = router_row(args, from, expert);
            float logit = 0.0f;
            for_eights([&](int offset, uint4 eight) {
                if (offset >= from.k) return;
                logit = add_eight<T>(w4a16::normalize(eight, from.norm_weight + offset, inverse),
                                     *reinterpret_cast<uint4 const*>(weights + offset), logit);
            });
            logit = ptx::warp_sum(logit);
            if (lane == 0) w4a16::store_partial(of.logits + token * of.count + expert, logit, from.layer);
        }
    }
}

// By one warp, as moe_routing.cuh chooses.
template <typename T>
__device__ __forceinline__ void choose_experts(DecoderArgs<T> const& args, int layer, int token, Choice& choice) {
    Experts<T> const& of = args.experts;
    constexpr int kSlots = kMostExperts / 32;
    int const lane = threadIdx.x % 32;
    w4a16::Partial const* const logits = of.logits + token * of.count;
    w4a16::Partial parts[kSlots];
    auto const load = [&](int i, bool wanted) { w4a16::load_partial_if(wanted, logits + i * 32 + lane, parts[i]); };
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        parts[i] = {-INFINITY, layer};
        load(i, i * 32 + lane < of.count);
    }
    w4a16::await_all<kSlots>([&](int i) { return parts[i].phase != layer; }, load);
    __syncwarp();
    float row[kSlots], largest = -routing::kLargest;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        bool const inside = i * 32 + lane < of.count;
        row[i] = inside ? routing::finite(parts[i].value) : -INFINITY;
        largest = fmaxf(largest, row[i]);
    }
    routing::Score score{of.scoring, 0.0f, 1.0f};
    if (of.scoring == TRT_NVFP4_SOFTMAX) {
        score.largest = routing::warp_largest(largest);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kSlots; ++i) total += expf(row[i] - score.largest);
        score.total = ptx::warp_sum(total);
    }
    routing::Keys<kSlots> keys;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        keys.slots[i] = i * 32 + lane < of.count ? routing::ordered(routing::finite(score(row[i]))) : 0;
    }
    int expert = 0;  // of rank `lane`
#pragma unroll 1
    for (int rank = 0; rank < of.chosen; ++rank) {
        int const popped = keys.pop();
        if (lane == rank) expert = popped;
    }
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        float const of_slot = __shfl_sync(0xffffffffu, row[i], expert % 32);
        if (expert / 32 == i) logit = of_slot;
    }
    bool const mine = lane < of.chosen;
    float weight = mine ? score(logit) : 0.0f;
    if (of.scoring == TRT_NVFP4_SOFTMAX_OF_CHOSEN) {
        float const most = routing::warp_largest(mine ? weight : -routing::kLargest);
        weight = mine ? expf(weight - most) : 0.0f;
        weight = routing::ratio(weight, ptx::warp_sum(weight));
    }
    if (of.renormalize) weight = routing::ratio(weight, ptx::warp_sum(weight) + 1e-20f);
    weight *= of.scaling_factor;
    float const scale = mine ? args.program.projections[kDown].tensor_scale[layer * of.count + expert] : 0.0f;
    float const most = routing::warp_largest(fabsf(weight * scale));
    int const next = __shfl_down_sync(0xffffffffu, expert, 1);
    if (mine) {
        choice.experts[lane] = expert;
        choice.weights[lane] = weight;
        choice.factors[lane] = most > 0.0f ? weight * scale / most : 0.0f;
        w4a16::Projection const& down = args.program.projections[kDown];
        choice.jumps[lane] = {(next - expert) * down.codes_per_layer - of.chunks() * (w4a16::kChunk / 2),
                              (next - expert) * down.scales_per_layer - of.chunks() * 4 * 512, of.chunks()};
    }
    if (lane == 0) choice.scale = most;
    __syncwarp();
}

// A layer's choices, for who multiplies and for the producer warps, and each token's 1 / rms. `from`: the first
// token's.
template <typename T, class Shared>
__device__ __forceinline__ void route(DecoderArgs<T> const& args, Words<T> const& from, Shared& shared,
                                      uint32_t chosen) {
    w4a16::Projection const* const p = args.program.projections;
    int const block = blockIdx.x;
    // Nobody waits for blocks without a task and an expert to score, so what they read might be gone.
    bool const has_task = block < max(p[kUp].tasks, p[kDown].tasks);
    if (!has_task && block >= args.experts.count) return;
    if (block < args.experts.count) {
        T const* const first = router_row(args, from, block);
        for (int i = threadIdx.x * 64; i < from.k; i += w4a16::kThreads * 64) ptx::prefetch(first + i);
    }
    if constexpr (Shared::kTokens == 1) {
        score_token(args, from, shared.squares, shared.rms);
    } else {
        score_tokens(args, from, shared.rms);
    }
    if (!has_task) return;
    int const warp = threadIdx.x / 32;
    if (warp < args.m) {
#pragma unroll 1
        for (int token = warp; token < args.m; token += kWarps) {
            choose_experts(args, from.layer, token, shared.choices[token]);
        }
        ptx::mbarrier_arrive(chosen);  // all lanes, which compute-sanitizer's racecheck needs to see the order
    }
    w4a16::sync_warps();
}

// Threads that choose, all lanes of a warp together.
template <typename T>
__device__ __forceinline__ int choosers(DecoderArgs<T> const& args) {
    return min(args.m, kWarps) * 32;
}

}  // namespace trt_nvfp4::decoder
