// What lies between two layers of sm90_w4a16_mlp.cuh: partial sums of down, or x at first, become y and the image of
// the next layer's x. A warp does a fragment at a time.
#pragma once

#include "common/divisor.h"
#include "exchange/counts.cuh"
#include "exchange/parity.cuh"
#include "heuristics/sm90_w4a16.h"
#include "ptx/reduce.cuh"
#include "w4a16/sm90/common/fragment.cuh"

namespace trt_nvfp4::sm90 {

// Arguments of all layers.
template <typename T>
struct Projection {
    WeightMaps maps;
    float const* tensor_scale;
    T const* bias;
    int rows, k;
    Split split;
    uint8_t* x;      // an image
    int64_t x_step;  // bytes from a layer's to the next one's
    // Only for up.
    TrtNvfp4Activation activation;
    bool gated;
    float alpha, limit;
    int padded_width;  // of the hidden values' image

    __device__ __forceinline__ uint8_t* x_of(int layer) const { return x + layer * x_step; }

    // Tiles of up that a chunk of hidden values lies in: all of their warps write it.
    __device__ __forceinline__ int tiles_per_chunk() const { return (gated ? 2 : 1) * kChunk / kTileRows; }
};

// Up to 16 tokens activations say themselves whether they have been written, as parts of sums do: a fence of the GPU
// behind each phase waits for the weights that are in flight. Activations are sentinels until then
// (exchange/sentinels.cuh), each layer's in images of its own, so that nothing is erased.
constexpr int kFlagTokens = 16;
template <int kTokens>
constexpr bool kValuesAreFlags = kTokens <= kFlagTokens;

// With more tokens, how often what has been written, since the launch's start: zero before it.
struct Counts {
    uint32_t* image;    // [chunks of x]: fragments of rows
    uint32_t* hidden;   // [chunks of hidden values]: by the blocks of up
    uint32_t* squares;  // one: fragments of rows, which many blocks would ask for all the time
};

template <typename T>
struct MlpArgs {
    Projection<T> up, down;
    int tasks[2];       // of clusters, in each phase: up, down
    Divisor splits[2];  // of K
    Divisor columns;    // of rows' fragments
    int layers, m;
    uint32_t one;    // 1, see shift_left
    uint32_t ahead;  // stages, see kChunksAhead
    T const* x;
    T* y;
    T const* norm_weight;  // [layers, width of x]; null: no RMSNorm
    float epsilon;
    bool residual;
    float2* partials;  // see PartialSums
    float2* squares;   // [tokens / 8, parts of x, 4]: sums of squares
    Counts counts;
};

static_assert(kTileRows == kChunk);  // so that a tile's warps fill a chunk of the image

// Columns of 8 tokens of a fragment: two where a warp would otherwise have two fragments, one waiting behind the other.
template <int kTokens>
constexpr int kRowColumns = kTokens < 64 ? 1 : 2;

template <int kTokens>
using RowFragment = Fragment<kRowColumns<kTokens>>;
template <int kTokens>
constexpr int kRowValues = RowFragment<kTokens>::kValues;  // of a lane

template <int kTokens>
__host__ __device__ __forceinline__ int row_columns(int m) {
    return (m + 8 * kRowColumns<kTokens> - 1) / (8 * kRowColumns<kTokens>);
}

// Fragments that a chunk of the image is made of.
template <int kTokens>
__device__ __forceinline__ int units_per_chunk(int m) {
    return kUnitsPerTile * row_columns<kTokens>(m);
}

// This lane's sums of down: [tiles, warps, quarters, tokens / 8], which are the fragments, [splits of K, lanes]. A
// fragment's parts lie side by side, where one address finds them all: what the code between two tasks is long, all
// blocks wait for.
template <typename T, int kTokens>
struct PartialSums {
    float2* first;
    uint32_t step;  // to the next fragment's

    __device__ __forceinline__ explicit PartialSums(MlpArgs<T> const& args)
        : first(args.partials + threadIdx.x % 32), step(args.down.split.splits * kPartStep) {}
    __device__ __forceinline__ float2* of(uint32_t fragment) const { return first + fragment * step; }
};

// A lane's part of a fragment of rows, and where it lies.
template <int kTokens>
struct Unit {
    static constexpr int kAll = kSumTokens<kTokens> / 8;  // columns

    RowFragment<kTokens> fragment;
    uint32_t index;  // ((tile, warp, quarter), column), as in down

    __device__ __forceinline__ Unit(uint32_t place, int column)
        : fragment(place / kUnitsPerTile, place / kQuarters % kWarps, place % kQuarters, column),
          index(place * kAll + column) {}

    __device__ __forceinline__ uint32_t place() const { return index / kAll; }
    __device__ __forceinline__ uint32_t column() const { return fragment.token / 8; }
};

// This block's of m rows of `width`: number = (tile, warp, quarter, column), of the columns there are, from begin to
// end.
template <int kTokens>
class Units {
 public:
    int begin, end;

    __device__ __forceinline__ Units(Divisor by_columns, int m, int width)
        : columns_(row_columns<kTokens>(m)), first_(0, 0) {
        int const units = tiles_of(width) * units_per_tile();
        int const share = (units + gridDim.x - 1) / gridDim.x;
        begin = min(static_cast<int>(blockIdx.x) * share, units);
        end = min(begin + share, units);
        first_ = unit(by_columns, begin + threadIdx.x / 32);
    }
    __device__ __forceinline__ int units_per_tile() const { return kUnitsPerTile * columns_; }

    // Calls f(unit) for this warp's. The first, mostly the only one, has been found before.
    template <typename F>
    __device__ __forceinline__ void each(Divisor by_columns, F&& f) const {
        Unit<kTokens> now = first_;
#pragma unroll 1
        for (int number = begin + threadIdx.x / 32; number < end;) {
            f(now);
            number += kWarps;
            if (number < end) now = unit(by_columns, number);
        }
    }

    // By one thread: those that have been written, for each tile.
    __device__ __forceinline__ void count_tiles(uint32_t* counters) const {
        for (int number = begin; number < end;) {
            int const tile = number / units_per_tile();
            int const next = min((tile + 1) * units_per_tile(), end);
            count(counters + tile, next - number);
            number = next;
        }
    }

 private:
    __device__ __forceinline__ Unit<kTokens> unit(Divisor by_columns, int number) const {
        uint32_t const place = by_columns.of(number);
        return Unit<kTokens>(place, (number - place * columns_) * kRowColumns<kTokens>);
    }

    int columns_;
    Unit<kTokens> first_;
};

// An activation to an image; where it is a flag, for all blocks to read.
template <typename T, int kTokens>
__device__ __forceinline__ void store_value(uint8_t* place, float value) {
    T const rounded = ptx::from_float<T>(value);
    if constexpr (kValuesAreFlags<kTokens>) {
        asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(place),
                     "h"(*reinterpret_cast<uint16_t const*>(&rounded))
                     : "memory");
    } else {
        *reinterpret_cast<T*>(place) = rounded;
    }
}

template <typename T, int kTokens>
__device__ __forceinline__ void store_image(MlpArgs<T> const& args, int layer, Unit<kTokens> const& unit, int width,
                                            float const (&values)[kRowValues<kTokens>]) {
    using Layout = ImageLayout<kTokens>;
    uint8_t* const places = args.up.x_of(layer) + Layout::offset(unit.fragment.row, unit.fragment.token);
#pragma unroll
    for (int i = 0; i < kRowValues<kTokens>; ++i) {
        bool const inside = unit.fragment.row < width && unit.fragment.token_of(i) < args.m;
        if (kTokens == 1 && unit.fragment.token_of(i) > 0) continue;  // which have no place
        // Who waits for values waits for those too that are not there.
        if (!kValuesAreFlags<kTokens> && !inside) continue;
        int const token = unit.fragment.token_of(i) - unit.fragment.token;
        store_value<T, kTokens>(places + token * Layout::kTokenBytes, inside ? values[i] : 0.0f);
    }
}

// Counts the block's fragments, unless they are flags, once they can be read.
template <int kTokens>
__device__ __forceinline__ void publish_image(Units<kTokens> const& units, Counts const& counts) {
    if (kValuesAreFlags<kTokens>) return;
    publish<32 * kWarps>([&] { units.count_tiles(counts.image); });
}

// Sums of squares of a column's tokens that are this lane's, of fragment `part` of all those of a row.
template <typename T>
__device__ __forceinline__ float2* squares_of(MlpArgs<T> const& args, uint32_t parts, uint32_t column, uint32_t part) {
    return args.squares + (column * parts + part) * 4 + threadIdx.x % 4;
}
__device__ __forceinline__ uint32_t parts_of(int width) { return tiles_of(width) * kUnitsPerTile; }

template <typename T, int kTokens>
__device__ __forceinline__ void store_squares(MlpArgs<T> const& args, int layer, Unit<kTokens> const& unit, int width,
                                              float const (&values)[kRowValues<kTokens>]) {
    // Padding tokens leave these unread.
    float squares[kRowValues<kTokens>];
#pragma unroll
    for (int i = 0; i < kRowValues<kTokens>; ++i) {
        squares[i] = unit.fragment.row < width ? values[i] * values[i] : 0.0f;
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
        }
    }
    if (threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int n = 0; n < kRowColumns<kTokens>; ++n) {
        float2* const place = squares_of(args, parts_of(width), unit.column() + n, unit.place());
        store_parts(place, squares[2 * n], squares[2 * n + 1], (layer + 1) & 1);
    }
}

// Rows whose squares are in flight become the image of the next layer's x.
template <typename T, int kTokens>
__device__ __forceinline__ void normalize_rows(MlpArgs<T> const& args, int layer, int width,
                                               Units<kTokens> const& units) {
    constexpr int kValues = kRowValues<kTokens>, kColumns = kRowColumns<kTokens>;
    uint32_t const parts = parts_of(width);
    T const* const rows = layer < 0 ? args.x : args.y;
    if (!kValuesAreFlags<kTokens>) {
        publish<32 * kWarps>([&] { count(args.counts.squares, units.end - units.begin); });
    }
    units.each(args.columns, [&](Unit<kTokens> const& unit) {
        RowFragment<kTokens> const& fragment = unit.fragment;
        float values[kValues] = {}, weight = 0.0f;
        fragment.each(width, args.m, [&](int i, int token) {
            values[i] = ptx::to_float(rows[static_cast<int64_t>(token) * width + fragment.row]);
            weight = ptx::to_float(args.norm_weight[static_cast<int64_t>(layer + 1) * width + fragment.row]);
        });
        if (!kValuesAreFlags<kTokens>) {
            await_count(args.counts.squares, (layer + 2u) * (parts * row_columns<kTokens>(args.m)));
        }
        // Lanes 4g + t: every eighth part, tokens 2t and 2t + 1.
        float totals[kValues] = {};
        uint32_t const own = threadIdx.x % 32 / 4;
        add_parts<32 / kColumns, kColumns>(squares_of(args, parts, unit.column(), own), parts * 4,
                                           static_cast<int>(parts - own + 7) / 8, (layer + 1) & 1, totals);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], distance);
            }
            values[i] *= weight / sqrtf(totals[i] / static_cast<float>(width) + args.epsilon);
        }
        store_image<T, kTokens>(args, layer + 1, unit, width, values);
    });
}

// The rows behind `layer`, or, of -1, in front of layer 0: y, and the image of the next layer's x.
template <typename T, int kTokens>
__device__ void do_rows(MlpArgs<T> const& args, int layer, Units<kTokens> const& units) {
    bool const first = layer < 0;
    bool const last = layer + 1 == args.layers;
    bool const norm = args.norm_weight != nullptr;
    int const width = first ? args.up.k : args.down.rows;
    T const* const x = layer <= 0 ? args.x : args.y;
    constexpr int kValues = kRowValues<kTokens>;
    constexpr int kColumns = kRowColumns<kTokens>;
    units.each(args.columns, [&](Unit<kTokens> const& unit) {
        RowFragment<kTokens> const& fragment = unit.fragment;
        // Asked for before the wait, used after it.
        T added[kValues], bias = ptx::from_float<T>(0.0f);
#pragma unroll
        for (T& value : added) value = bias;
        if (first || args.residual) {
            fragment.each(width, args.m,
                          [&](int i, int token) { added[i] = x[static_cast<int64_t>(token) * width + fragment.row]; });
        }
        float values[kValues];
        if (first) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) values[i] = ptx::to_float(added[i]);
        } else {
            if (fragment.row < width) bias = args.down.bias[static_cast<int64_t>(layer) * width + fragment.row];
            float const tensor_scale = args.down.tensor_scale[layer];
            PartialSums<T, kTokens> const partials(args);
#pragma unroll
            for (float& value : values) value = 0.0f;
            add_parts<kMaxSplits, kColumns>(partials.of(unit.index), partials.step, args.down.split.splits, layer & 1,
                                            values);
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                float const value = fmaf(values[i], value_scale<T>(tensor_scale), ptx::to_float(bias));
                values[i] = ptx::to_float(ptx::from_float<T>(value + ptx::to_float(added[i])));
            }
            if (last || args.residual || norm) {
                fragment.each(width, args.m, [&](int i, int token) {
                    args.y[static_cast<int64_t>(token) * width + fragment.row] = ptx::from_float<T>(values[i]);
                });
            }
        }
        if (last) return;
        if (norm) {
            store_squares<T, kTokens>(args, layer, unit, width, values);
        } else {
            store_image<T, kTokens>(args, layer + 1, unit, width, values);
        }
    });
    if (last) return;
    if (norm) normalize_rows<T, kTokens>(args, layer, width, units);
    publish_image<kTokens>(units, args.counts);
}

}  // namespace trt_nvfp4::sm90
