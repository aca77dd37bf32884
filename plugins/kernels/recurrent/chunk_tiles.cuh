// Tiles of 16-bit elements in shared memory as operands of mma.sync. Rows lie at an odd number of 16-byte units from
// each other, so that ldmatrix meets no bank twice.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"
#include "recurrent/launch.h"

namespace trt_nvfp4::recurrent {

// A tile of kRows x kColumns elements, a multiple of 16 columns.
template <int kRows, int kWidth>
struct Tile {
    static constexpr int kPitch = 2 * kWidth + 16;  // bytes
    static constexpr int kBytes = kRows * kPitch;
    static_assert(kWidth % 16 == 0, "an odd number of units from row to row");

    static __device__ __forceinline__ uint32_t at(uint32_t tile, int row, int column) {
        return tile + row * kPitch + column * 2;
    }
};

// A, 16x16 of rows from `row` and columns from `column` on.
template <typename Tile>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int row, int column) {
    int const lane = threadIdx.x % 32;
    ptx::ldmatrix(a, Tile::at(tile, row + lane % 16, column + lane / 16 * 8));
}

// A whose element [m][k] is the tile's [k][m].
template <typename Tile>
__device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], uint32_t tile, int m, int k) {
    int const lane = threadIdx.x % 32;
    ptx::ldmatrix_transposed(a, Tile::at(tile, k + lane % 8 + lane / 16 * 8, m + lane / 8 % 2 * 8));
}

// B, 16 (k) x 16 (n): [0], [1] are the first eight columns'. Element [k][n] is the tile's.
template <typename Tile>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int k, int n) {
    int const lane = threadIdx.x % 32;
    ptx::ldmatrix_transposed(b, Tile::at(tile, k + lane % 16, n + lane / 16 * 8));
}

// B whose element [k][n] is the tile's [n][k].
template <typename Tile>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], uint32_t tile, int k, int n) {
    int const lane = threadIdx.x % 32;
    ptx::ldmatrix(b, Tile::at(tile, n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        __half2 const pair = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    } else {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    }
}

template <typename Tile, typename T>
__device__ __forceinline__ void store_pair(uint32_t tile, int row, int column, float low, float high) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(Tile::at(tile, row, column)), "r"(pack<T>(low, high)) : "memory");
}

template <typename Tile, typename T>
__device__ __forceinline__ float2 load_pair(uint32_t tile, int row, int column) {
    uint32_t const word = ptx::load_shared_word(Tile::at(tile, row, column));
    if constexpr (std::is_same_v<T, __half>) {
        return __half22float2(reinterpret_cast<__half2 const&>(word));
    } else {
        return __bfloat1622float2(reinterpret_cast<__nv_bfloat162 const&>(word));
    }
}

// kThreads threads copy kRows rows of `width` elements, which lie `stride` elements apart; what is beyond `rows` and
// `width` becomes zero.
template <typename Tile, int kRows, int kWidth, int kThreads, typename T>
__device__ __forceinline__ void copy_tile(uint32_t tile, T const* from, int64_t stride, int rows, int width) {
    constexpr int kUnits = kWidth / 8;
    static_assert(kRows * kUnits % kThreads == 0, "the same for every thread");
#pragma unroll
    for (int step = 0; step < kRows * kUnits / kThreads; ++step) {
        int const i = threadIdx.x % kThreads + step * kThreads, row = i / kUnits, unit = i % kUnits;
        bool const inside = row < rows && unit * 8 < width;
        ptx::cp_async_16(Tile::at(tile, row, unit * 8), inside ? from + row * stride + unit * 8 : from, inside);
    }
}

}  // namespace trt_nvfp4::recurrent
