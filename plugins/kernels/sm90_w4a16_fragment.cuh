// Accumulators of a warp's product of 8 tokens, and where their values lie in memory.
//
// acc[i] of a warp (mma_sync.cuh) holds rows of quarters 2 i and 2 i + 1 of its warpgroup's 128.
#pragma once

#include "ptx/element.cuh"
#include "sm90_w4a16_image.cuh"
#include "sm90_w4a16_weights.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kUnitsPerTile = 16;  // fragments of 8 tokens of a tile of kTileRows: of 8 warps, of two acc[i]

// Value i of a lane's four: of row i / 2, token i % 2.
struct Fragment {
    int rows[2];
    int token;  // the first

    __device__ __forceinline__ Fragment(int tile, int warp, int i, int column) {
        int const g = threadIdx.x % 32 / 4;
        rows[0] = tile * kTileRows + warp / 4 * kGroupRows + i * 64 + warp % 4 * 8 + g % 4 * 2 + g / 4;
        rows[1] = rows[0] + 32;
        token = column * 8 + threadIdx.x % 4 * 2;
    }

    // Calls f(i, row, token) for the values there are.
    template <typename F>
    __device__ __forceinline__ void each(int width, int m, F&& f) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (rows[i / 2] < width && token + i % 2 < m) f(i, rows[i / 2], token + i % 2);
        }
    }
};

// Where value k of a token lies in an image (see pair_offset).
template <int kTokens>
__device__ __forceinline__ int64_t value_offset(int k, int token) {
    return pair_offset<kTokens>(k - (k & 4), token) + (k & 4) / 2;
}

template <typename T, int kTokens>
__device__ __forceinline__ void store_value(uint8_t* image, int k, int token, float value) {
    *reinterpret_cast<T*>(image + value_offset<kTokens>(k, token)) = ptx::from_float<T>(value);
}

}  // namespace trt_nvfp4::sm90
