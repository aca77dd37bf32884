// What lies between two layers of sm90_w4a16_mlp.cuh: partial sums of down, or x at first, become y and the image of
// the next layer's x. A warp does a fragment at a time.
#pragma once

#include "divisor.h"
#include "heuristics/sm90_w4a16.h"
#include "ptx/reduce.cuh"
#include "sm80_w4a16_exchange.cuh"
#include "sm90_w4a16_counts.cuh"
#include "sm90_w4a16_fragment.cuh"

namespace trt_nvfp4::sm90 {

// Of all layers.
template <typename T>
struct Projection {
    WeightMaps maps;
    float const* tensor_scale;
    T const* bias;
    int rows, k;
    Split split;
    uint8_t* x;      // an image
    int64_t x_step;  // bytes from a layer's to the next one's
    // Of up alone.
    TrtNvfp4Activation activation;
    bool gated;
    float alpha, limit;
    int padded_width;  // of the hidden values' image

    __device__ __forceinline__ uint8_t* x_of(int layer) const { return x + layer * x_step; }

    // Tiles of up that a chunk of hidden values lies in: all of their warps write it.
    __device__ __forceinline__ int tiles_per_chunk() const { return (gated ? 2 : 1) * kChunk / kTileRows; }
};

// Partial sums say themselves whether they have been written, and up to 8 tokens activations too: a fence of the GPU
// behind each phase waits for the weights that are on their way. Activations are absent until then (exchange.cuh), each
// layer's in images of its own, so that nothing is erased.
constexpr int kFlagTokens = 8;
template <int kTokens>
constexpr bool kValuesAreFlags = kTokens <= kFlagTokens;

// With more tokens, how often what has been written, since the launch's start: zero before it.
struct Counts {
    uint32_t* image;    // [chunks of x]: fragments of rows
    uint32_t* hidden;   // [chunks of hidden values]: by the blocks of up
    uint32_t* squares;  // one: fragments of rows; at any number of tokens
};

template <typename T>
struct MlpArgs {
    Projection<T> up, down;
    int tasks[2];       // of clusters, in each phase: up, down
    Divisor splits[2];  // of K
    Divisor columns;    // of rows' fragments
    int layers, m;
    uint32_t one;  // 1, see shift_left
    T const* x;
    T* y;
    T const* norm_weight;  // [layers, width of x]; null: no RMSNorm
    float epsilon;
    bool residual;
    float2* partials;  // see PartialSums
    float* squares;    // [tokens / 8, parts of x, 8]: sums of squares
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
        : first(args.partials + threadIdx.x % 32), step(args.down.split.splits * 32) {}
    __device__ __forceinline__ float2* of(uint32_t fragment) const { return first + fragment * step; }
};

// A partial sum says in its last bit whether its layer is odd: it has been written once the bit is another than before.
// Beside a phase (Partial in sm80_w4a16_exchange.cuh) it spares half of the bytes.
static_assert(w4a16::kAbsentByte % 2 == 1);  // as the layer before the first

__device__ __forceinline__ float with_parity(float sum, int layer) {
    return __uint_as_float((__float_as_uint(sum) & ~1u) | (layer & 1));
}
__device__ __forceinline__ bool has_parity(float2 sums, int layer) {
    return (((__float_as_uint(sums.x) ^ layer) | (__float_as_uint(sums.y) ^ layer)) & 1) == 0;
}

// With the bit an infinity would be no number.
__device__ __forceinline__ float without_parity(float sum) { return __uint_as_float(__float_as_uint(sum) & ~1u); }

// Past L1, never from a register; without a branch.
__device__ __forceinline__ void load_sums_if(bool wanted, float2 const* source, float2& sums) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %3, 0;\n"
        "@wanted ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n"
        "}"
        : "+f"(sums.x), "+f"(sums.y)
        : "l"(source), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

// For all blocks to read; each float in one piece.
__device__ __forceinline__ void store_sums(float2* destination, float2 sums) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(destination), "f"(sums.x), "f"(sums.y)
                 : "memory");
}

// The sums of fragments from `fragment` on over the parts of K, in their order, once they have been written.
template <typename T, int kTokens>
__device__ __forceinline__ void sum_parts(MlpArgs<T> const& args, int layer, uint32_t fragment,
                                          float (&sums)[kRowValues<kTokens>]) {
    constexpr int kColumns = kRowColumns<kTokens>;
    int const splits = args.down.split.splits;
    PartialSums<T, kTokens> const partials(args);
    // All parts at once: one trip to L2. Those that are not there have the layer's parity, and are zero without it.
    float2 parts[kColumns][kMaxSplits];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
        float2 const* const first = partials.of(fragment + n);
#pragma unroll
        for (int j = 0; j < kMaxSplits; ++j) {
            parts[n][j].x = parts[n][j].y = __uint_as_float(layer & 1);
            load_sums_if(j < splits, first + j * 32, parts[n][j]);
        }
    }
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            float2 const* const first = partials.of(fragment + n);
#pragma unroll
            for (int j = 0; j < kMaxSplits; ++j) {
                bool const absent = !has_parity(parts[n][j], layer);
                missing |= absent;
                load_sums_if(absent, first + j * 32, parts[n][j]);
            }
        }
    } while (missing);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
        sums[2 * n] = sums[2 * n + 1] = 0.0f;
#pragma unroll
        for (int j = 0; j < kMaxSplits; ++j) {
            sums[2 * n] += without_parity(parts[n][j].x);
            sums[2 * n + 1] += without_parity(parts[n][j].y);
        }
    }
}

// This block's fragments of m rows of `width`: unit = (place, column), place = (tile, warp, quarter), as in down, from
// begin to end.
template <int kTokens>
struct Units {
    int columns, begin, end;

    __device__ __forceinline__ Units(int m, int width) : columns(row_columns<kTokens>(m)) {
        int const units = tiles_of(width) * units_per_tile();
        int const share = (units + gridDim.x - 1) / gridDim.x;
        begin = min(static_cast<int>(blockIdx.x) * share, units);
        end = min(begin + share, units);
    }
    __device__ __forceinline__ int units_per_tile() const { return kUnitsPerTile * columns; }

    // Calls f(fragment, place, column) for this warp's, with their first columns.
    template <typename F>
    __device__ __forceinline__ void each(Divisor by_columns, F&& f) const {
#pragma unroll 1
        for (int unit = begin + threadIdx.x / 32; unit < end; unit += kWarps) {
            uint32_t const place = by_columns.of(unit);
            int const column = (unit - place * columns) * kRowColumns<kTokens>;
            f(RowFragment<kTokens>(place / kUnitsPerTile, place / kQuarters % kWarps, place % kQuarters, column), place,
              column);
        }
    }

    // By one thread: those that have been written, for each tile.
    __device__ __forceinline__ void count_tiles(uint32_t* counters) const {
        for (int unit = begin; unit < end;) {
            int const tile = unit / units_per_tile();
            int const next = min((tile + 1) * units_per_tile(), end);
            count(counters + tile, next - unit);
            unit = next;
        }
    }
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
__device__ __forceinline__ void store_image(MlpArgs<T> const& args, int layer, RowFragment<kTokens> const& fragment,
                                            int width, float const (&values)[kRowValues<kTokens>]) {
    uint8_t* const image = args.up.x_of(layer);
#pragma unroll
    for (int i = 0; i < kRowValues<kTokens>; ++i) {
        int const token = fragment.token_of(i);
        bool const inside = fragment.row < width && token < args.m;
        // Who waits for values waits for those too that are not there.
        if (!kValuesAreFlags<kTokens> && !inside) continue;
        store_value<T, kTokens>(image + value_offset<kTokens>(fragment.row, token), inside ? values[i] : 0.0f);
    }
}

// Counts the block's fragments, unless they are flags, once they can be read.
template <int kTokens>
__device__ __forceinline__ void publish_image(Units<kTokens> const& units, Counts const& counts) {
    if (kValuesAreFlags<kTokens>) return;
    publish<32 * kWarps>([&] { units.count_tiles(counts.image); });
}

// The rows behind `layer`, or, of -1, in front of layer 0: y, and the image of the next layer's x.
template <typename T, int kTokens>
__device__ void do_rows(MlpArgs<T> const& args, int layer, Units<kTokens> const& units) {
    bool const first = layer < 0;
    bool const last = layer + 1 == args.layers;
    bool const norm = args.norm_weight != nullptr;
    int const width = first ? args.up.k : args.down.rows;
    uint32_t const parts = tiles_of(width) * kUnitsPerTile;
    T const* const x = layer <= 0 ? args.x : args.y;
    constexpr int kValues = kRowValues<kTokens>;
    // Of a column's tokens that are this lane's.
    auto const square = [&](uint32_t column, uint32_t part) {
        return reinterpret_cast<float2*>(args.squares + (column * parts + part) * 8 + threadIdx.x % 4 * 2);
    };
    units.each(args.columns, [&](RowFragment<kTokens> const& fragment, uint32_t place, int column) {
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
            sum_parts<T, kTokens>(args, layer, place * (kTokens / 8) + column, values);
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
        if (!norm) {
            store_image<T, kTokens>(args, layer + 1, fragment, width, values);
            return;
        }
        // Of tokens that are not there these are not read.
        float squares[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            squares[i] = fragment.row < width ? values[i] * values[i] : 0.0f;
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
            }
        }
        if (threadIdx.x % 32 < 4) {
#pragma unroll
            for (int n = 0; n < kRowColumns<kTokens>; ++n) {
                *square(column + n, place) = make_float2(squares[2 * n], squares[2 * n + 1]);
            }
        }
    });
    if (last) return;
    if (!norm) {
        publish_image<kTokens>(units, args.counts);
        return;
    }
    publish<32 * kWarps>([&] { count(args.counts.squares, units.end - units.begin); });
    units.each(args.columns, [&](RowFragment<kTokens> const& fragment, uint32_t, int column) {
        float values[kValues] = {}, weight = 0.0f;
        T const* const now = first ? args.x : args.y;
        fragment.each(width, args.m, [&](int i, int token) {
            values[i] = ptx::to_float(now[static_cast<int64_t>(token) * width + fragment.row]);
            weight = ptx::to_float(args.norm_weight[static_cast<int64_t>(layer + 1) * width + fragment.row]);
        });
        await_count(args.counts.squares, (layer + 2u) * (parts * units.columns));
        float totals[kValues] = {};
        // Lanes 4g + t: every eighth part, tokens 2t and 2t + 1. As many trips to L2 at once as registers allow.
#pragma unroll(32 / kRowColumns<kTokens>)
        for (uint32_t part = threadIdx.x % 32 / 4; part < parts; part += 8) {
#pragma unroll
            for (int n = 0; n < kRowColumns<kTokens>; ++n) {
                float2 const squares = __ldcg(square(column + n, part));
                totals[2 * n] += squares.x;
                totals[2 * n + 1] += squares.y;
            }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], distance);
            }
            values[i] *= weight / sqrtf(totals[i] / static_cast<float>(width) + args.epsilon);
        }
        store_image<T, kTokens>(args, layer + 1, fragment, width, values);
    });
    publish_image<kTokens>(units, args.counts);
}

}  // namespace trt_nvfp4::sm90
