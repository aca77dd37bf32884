// Accumulators of a warp's product of 8 tokens, and where their values lie in memory.
//
// acc[i] of a warp (mma_sync.cuh) holds rows of quarters 2 i and 2 i + 1 of its 128-row group.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/element.cuh"
#include "w4a16/sm90/common/staged_tile.cuh"
#include "w4a16/sm90/common/weights.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kQuarters = 4;
constexpr int kUnitsPerTile = 8 * kQuarters;  // a tile's fragments of the same tokens: of 8 warps

__host__ __device__ constexpr int tiles_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// The fragment of a product's sums.
template <typename T>
__device__ __forceinline__ float value_scale(float tensor_scale) {
    return tensor_scale * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
}

// A lane's sums of the first kColumns times 8 tokens, of each column and quarters 0 to 3 two; those of the others move
// up. For loops over columns that are not unrolled, where registers must be known (see smooth_activation.cuh).
template <int kColumns = 1, int kSums>
__device__ __forceinline__ void take_columns(float (&acc)[2][kSums], float (&sums)[8 * kColumns]) {
#pragma unroll
    for (int i = 0; i < 8 * kColumns; ++i) sums[i] = acc[i % 8 / 4][i / 8 * 4 + i % 4];
#pragma unroll
    for (int i = 4 * kColumns; i < kSums; ++i) {
        acc[0][i - 4 * kColumns] = acc[0][i];
        acc[1][i - 4 * kColumns] = acc[1][i];
    }
}

// A lane's values of a quarter: of a row, for two neighbouring tokens of each of kColumns columns.
template <int kColumns = 1>
struct Fragment {
    static constexpr int kValues = 2 * kColumns;

    int row, token;

    __device__ __forceinline__ Fragment(int tile, int warp, int quarter, int column) {
        row = tile * kTileRows + warp / 4 * kGroupRows + quarter * 32 + row_of_lane(warp);
        token = column * 8 + threadIdx.x % 4 * 2;
    }

    // Calls f(i, token) for the values there are.
    template <typename F>
    __device__ __forceinline__ void each(int width, int m, F&& f) const {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            if (row < width && token_of(i) < m) f(i, token_of(i));
        }
    }
    __device__ __forceinline__ int token_of(int i) const { return token + i / 2 * 8 + i % 2; }
};

// Calls store(place, i) for those there are of a lane's eight values of a tile, two of each quarter, with where value i
// goes in outputs [count, rows]. One address finds all: what ends a task is fetched anew each time.
template <typename Output, typename F>
__device__ __forceinline__ void each_output(Output* outputs, int rows, int count, int tile, int column, F&& store) {
    Fragment<> const fragment(tile, threadIdx.x / 32, 0, column);
    Output* const first = outputs + static_cast<int64_t>(fragment.token) * rows + fragment.row;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int const quarter = i / 2;
        if (fragment.row + quarter * 32 < rows && fragment.token + i % 2 < count) {
            store(first + (i % 2 == 0 ? 0 : rows) + quarter * 32, i);
        }
    }
}

// What a lane adds to its sums of a tile without gates: of four rows, one of each quarter.
template <typename T>
struct RowEpilogue {
    float tensor_scale;
    T bias[kQuarters];

    // `all`: of `rows` rows; null: zeros. Nothing is done with it before it is needed: that would wait for memory.
    __device__ __forceinline__ void load(float const* scale, T const* all, int rows, int tile) {
        tensor_scale = *scale;
#pragma unroll
        for (int i = 0; i < kQuarters; ++i) {
            int const row = Fragment<>(tile, threadIdx.x / 32, i, 0).row;
            bias[i] = all != nullptr && row < rows ? all[row] : ptx::from_float<T>(0.0f);
        }
    }
    __device__ __forceinline__ void apply(float (&values)[8]) const {
        float const scale = value_scale<T>(tensor_scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = fmaf(values[i], scale, ptx::to_float(bias[i / 2]));
    }
};

// What lane t of a token's four has of kEights * 32 values of K, in eights: scale block t of each group. `row`, from
// the first of the values on, null: zeros.
template <typename T, int kEights>
__device__ __forceinline__ void load_eights(T const* row, int t, int width, uint4 (&eights)[kEights]) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
        int const k = i / 2 * kGroup + t * 16 + i % 2 * 8;
        eights[i] = make_uint4(0u, 0u, 0u, 0u);
        if (row != nullptr && k < width) eights[i] = *reinterpret_cast<uint4 const*>(row + k);
    }
}

// In the pairs of products of several tokens.
template <typename T, int kEights>
__device__ __forceinline__ void pair_eights(uint4 (&eights)[kEights]) {
#pragma unroll
    for (uint4& eight : eights) eight = w4a16::pair_activations<T>(eight);
}

// Pairs to an image of `tokens`, from the unit on that has the first of the values.
template <int kEights>
__device__ __forceinline__ void store_eights(uint8_t* units, int tokens, int token, int t,
                                             uint4 const (&eights)[kEights]) {
    uint8_t* const own = units + token * 16 + t * 4;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
        uint32_t const four[4] = {eights[i].x, eights[i].y, eights[i].z, eights[i].w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            *reinterpret_cast<uint32_t*>(own + (i * 4 + pair) * tokens * 16) = four[pair];
        }
    }
}

}  // namespace trt_nvfp4::sm90
