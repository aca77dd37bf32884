// Activations for sm90_w4a16_moe.cuh.
#pragma once

#include "formats/fixed_point.cuh"
#include "moe/moe_routing.cuh"
#include "ptx/grid.cuh"
#include "w4a16/sm90/moe/activations.cuh"

namespace trt_nvfp4::sm90 {

// Groups of eight values of a lane: a warp stages kRowFactorK values of K of eight tokens at a time.
constexpr int kEights = kRowFactorK / 32;

template <typename T>
__device__ __forceinline__ void scale_eights(float factor, uint4 (&eights)[kEights]) {
#pragma unroll
    for (uint4& eight : eights) {
        T* const values = reinterpret_cast<T*>(&eight);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = ptx::from_float<T>(ptx::to_float(values[j]) * factor);
    }
}

// Groups of eight rows that become images: those of tokens, and in front of them, where x takes their weights, those of
// pairs in sorted order.
struct ImageGroups {
    int pairs, tokens;

    __host__ __device__ ImageGroups(int m, int top_k, bool scale_input, bool shared)
        : pairs(scale_input ? (m * top_k + 7) / 8 : 0), tokens(scale_input && !shared ? 0 : (m + 7) / 8) {}
};

constexpr int kImageThreads = 128;

__host__ __device__ constexpr int image_parts(int k) { return chunks_of(k) * (kChunk / kRowFactorK); }

// Zeros where the hidden values' image is longer than the tiles of up; where values are flags, the others are
// sentinels.
template <typename T>
__device__ __forceinline__ void erase_hidden(MixtureArgs<T> const& args, int segment, int rows, int thread,
                                             int threads) {
    Projection<T> const& up = args.matrices[kUp][segment];
    Projection<T> const& down = args.matrices[kDown][segment];
    RowImage<T> const hidden(down.x, down.k);
    int const written = tiles_of(up.rows) * kTileRows / (up.gated ? 2 : 1) / 8;
    int const begin = args.hidden_is_flags ? 0 : written;
    int const units = chunks_of(down.k) * (kChunk / 8) - begin;
    for (int i = thread; i < units * rows; i += threads) {
        int const unit = begin + i / rows, row = i % rows;
        uint32_t const bits = unit < written ? ~0u : 0u;
        *hidden.unit(unit, row) = make_uint4(bits, bits, bits, bits);
        if (unit % (kRowFactorK / 8) == 0) hidden.set_factor(unit / (kRowFactorK / 8), row, __uint_as_float(bits));
    }
}

template <typename T>
__device__ __forceinline__ void make_images(MixtureArgs<T> const& args, int thread, int threads) {
    for (int i = thread; i < args.counters; i += threads) args.done[kRouted][i] = 0;
    for (int i = thread; i < args.part_units; i += threads) args.parts[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
#pragma unroll 1
    for (int segment = kRouted; segment <= (args.shared_items > 0 ? kShared : kRouted); ++segment) {
        erase_hidden(args, segment, segment == kRouted ? args.m * args.top_k : args.m, thread, threads);
    }

    ImageGroups const groups(args.m, args.top_k, args.scale_input, args.shared_items > 0);
    int const k = args.matrices[kUp][kRouted].k;
    int const lane = threadIdx.x % 32;
    int const t = lane % 4;
    int const all = (groups.pairs + groups.tokens) * image_parts(k);
#pragma unroll 1
    for (int i = thread / 32; i < all; i += threads / 32) {
        int const part = i % image_parts(k), group = i / image_parts(k);
        bool const scaled = group < groups.pairs;
        int const row = (scaled ? group : group - groups.pairs) * 8 + lane / 4;
        bool const has_row = row < (scaled ? args.m * args.top_k : args.m);
        int token = row;
        float weight = 1.0f;
        if (scaled && has_row) {
            int const pair = args.plan.order[row];
            token = pair / args.top_k;
            weight = args.plan.weights[pair];
        }
        uint4 eights[kEights];
        load_eights(has_row ? args.x + static_cast<int64_t>(token) * k + part * kRowFactorK : nullptr, t,
                    k - part * kRowFactorK, eights);
        if (scaled) scale_eights<T>(weight, eights);
        float factor = 1.0f;
        if (args.m == 1) {
            factor = to_fixed_point<T, 1, 2>(eights);
        } else {
            if constexpr (kBecomesHalf<T>) factor = to_half<1, 2>(eights);
            pair_eights<Operand<T>>(eights);
        }
        if (!has_row) continue;
        RowImage<T> const image(args.matrices[kUp][args.scale_input && !scaled ? kShared : kRouted].x, k);
        if (t == 0) image.set_factor(part, row, factor);
        auto* const units = reinterpret_cast<uint8_t*>(image.unit(part * (kRowFactorK / 8), row));
        store_eights(units, 1, 0, t, eights);
    }
}

// A helper of moe_plan.
template <typename T>
struct GateAndMakeImages {
    MixtureArgs<T> mixture;

    __device__ __forceinline__ void operator()(RouteArgs const& args, int first, int step) const {
        if (args.shared_gate != nullptr) routing::gate_shared<T>(args, first / 32, step / 32);
        make_images(mixture, first, step);
    }
};

// A helper of moe_plan, for wide work items whose x becomes FP16.
template <typename T>
struct GateAndFindGreatest {
    MixtureArgs<T> mixture;

    __device__ __forceinline__ void operator()(RouteArgs const& args, int first, int step) const {
        if (args.shared_gate != nullptr) routing::gate_shared<T>(args, first / 32, step / 32);
        int const lane = threadIdx.x % 32;
#pragma unroll 1
        for (int token = first / 32; token < args.tokens; token += step / 32) {
            auto const* const x = reinterpret_cast<uint4 const*>(mixture.x + int64_t{token} * args.hidden);
            uint32_t greatest = 0;
#pragma unroll 8
            for (int i = lane; i < args.hidden / 8; i += 32) greatest = max(greatest, greatest_of<T>(x[i]));
            greatest = ptx::warp_max(greatest);
            if (lane == 0) mixture.greatest[token] = greatest;
        }
    }
};

// For wide work items: their tokens' x, and zeros behind the hidden values that up writes.
template <typename T>
__device__ __forceinline__ void make_item_images(MixtureArgs<T> const& args, int thread, int threads) {
    for (int i = thread; i < args.counters; i += threads) args.done[kRouted][i] = 0;
    int const lane = threadIdx.x % 32;
    int const k = args.matrices[kUp][kRouted].k;
    int const columns = args.item_tokens / 8;
#pragma unroll 1
    for (int segment = kRouted; segment <= (args.shared_items > 0 ? kShared : kRouted); ++segment) {
        Projection<T> const& up = args.matrices[kUp][segment];
        Projection<T> const& down = args.matrices[kDown][segment];
        int const items = segment == kRouted ? *args.plan.item_count : args.shared_items;
        int const written = min(tiles_of(up.rows) * kTileRows / (up.gated ? 2 : 1) / kRowFactorK, image_parts(down.k));
        int const parts = image_parts(k) + image_parts(down.k) - written;
#pragma unroll 1
        for (int i = thread / 32; i < items * columns * parts; i += threads / 32) {
            int const part = i % parts, column = i / parts % columns, item = i / (parts * columns);
            int first = item * args.item_tokens, count = min(args.item_tokens, args.m - first);
            if (segment == kRouted) {
                first = args.plan.items[item].first;
                count = args.plan.items[item].count;
            }
            if (column >= item_columns(count)) continue;
            uint4 eights[kEights] = {};
            if (part >= image_parts(k)) {
                ItemImage const image(down, item, first, count);
                uint8_t* const units = image.unit((part - image_parts(k) + written) * (kRowFactorK / 8), column);
                store_eights(units, 8, lane / 4, lane % 4, eights);
                continue;
            }
            int const row = column * 8 + lane / 4;
            bool const has_row = row < count;
            int token = first + row;
            float weight = 1.0f;
            if (segment == kRouted && has_row) {
                int const pair = args.plan.order[token];
                token = pair / args.top_k;
                if (args.scale_input) weight = args.plan.weights[pair];
            }
            load_eights(has_row ? args.x + static_cast<int64_t>(token) * k + part * kRowFactorK : nullptr, lane % 4,
                        k - part * kRowFactorK, eights);
            if (segment == kRouted && args.scale_input) scale_eights<T>(weight, eights);
            uint8_t* const units = ItemImage(up, item, first, count).unit(part * (kRowFactorK / 8), column);
            if constexpr (kXBecomesHalf<T>) {
                T const greatest = ptx::from_float<T>(has_row ? __uint_as_float(args.greatest[token]) * weight : 0.0f);
                HalfScale const scale(ptx::magnitude_bits(ptx::to_float(greatest)));
                to_half(scale, eights);
                if (part == 0 && lane % 4 == 0) {
                    args.factors[segment][(first_column(item, first) + column) * 8 + lane / 4] = scale.factor();
                }
                pair_eights<__half>(eights);
            } else {
                pair_eights<T>(eights);
            }
            store_eights(units, 8, lane / 4, lane % 4, eights);
        }
    }
}

// By a launch of its own, while the plan is made, which only weights for x and wide work items wait for. The launch
// before the plan has finished: the plan lets this one start behind its own wait.
template <typename T>
__global__ __launch_bounds__(kImageThreads) void sm90_w4a16_moe_images(__grid_constant__ MixtureArgs<T> const args) {
    ptx::launch_next();
    bool const wide = args.item_tokens > kItemTokens, awaits = args.scale_input || wide;
    int const thread = blockIdx.x * kImageThreads + threadIdx.x, threads = gridDim.x * kImageThreads;
    if (awaits) ptx::await_previous_launch();
    if (wide) {
        make_item_images(args, thread, threads);
    } else {
        make_images(args, thread, threads);
    }
    if (!awaits) ptx::await_previous_launch();
}

}  // namespace trt_nvfp4::sm90
