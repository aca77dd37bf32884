// out = epilogue(a W^T): W in NVFP4, a in T or in NVFP4, or both in E4M3, float32 FMA over a 64x64 tile. Any m, n > 0
// and k % 16 == 0; one block owns a tile and walks k in order, so results are deterministic. The yardstick that the
// fast kernels are tested against.
#pragma once

#include "common/activation.cuh"
#include "common/programmatic_launch.cuh"
#include "formats/fp8_matrix.cuh"
#include "formats/nvfp4_matrix.cuh"
#include "ptx/e2m1.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/element.cuh"

namespace trt_nvfp4 {

// Rows of T as a GEMM operand.
template <typename T>
struct DenseRows {
    T const* values;
};

template <typename T, typename Out, typename W = Nvfp4Rows>
struct GemmArgs {
    int64_t m, n, k;
    W w;
    T const* bias;  // [n]
    TrtNvfp4Activation activation;
    int gated;  // rows 2i and 2i + 1 of W are gate i and up i; out is [m, n/2]
    float alpha, limit;
    T const* residual;  // as out; null: none. May be out itself.
    Out* out;
};

constexpr int kGemmTile = 64;
constexpr int kGemmThreads = 256;
// An odd pitch spreads a column over the banks.
using GemmTile = float[kGemmTile][kGemmTile + 1];

// Both loaders fill tile[k][row] and put zeros outside the matrix. Here a thread decodes one block of 16.
__device__ __forceinline__ void load_tile(GemmTile& tile, Nvfp4Rows const& a, int64_t row0, int64_t rows, int64_t k0,
                                          int64_t k) {
    int const local_row = threadIdx.x / 4;
    int const local_k = threadIdx.x % 4 * kBlock;
    int64_t const row = row0 + local_row;
    uint2 codes = make_uint2(0u, 0u);
    float scale = 0.0f;
    if (row < rows && k0 + local_k < k) {
        codes = *reinterpret_cast<uint2 const*>(a.packed + (row * k + k0 + local_k) / 2);
        scale = ptx::e4m3_decode_unsigned(a.block_scales[scale_offset(row, (k0 + local_k) / kBlock, padded_blocks(k))]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        tile[local_k + i][local_row] = ptx::e2m1_decode(codes.x >> (4 * i)) * scale;
        tile[local_k + 8 + i][local_row] = ptx::e2m1_decode(codes.y >> (4 * i)) * scale;
    }
}

template <typename T>
__device__ __forceinline__ void load_tile(GemmTile& tile, DenseRows<T> const& a, int64_t row0, int64_t rows, int64_t k0,
                                          int64_t k) {
    int const local_k = threadIdx.x % kGemmTile;
    for (int local_row = threadIdx.x / kGemmTile; local_row < kGemmTile; local_row += kGemmThreads / kGemmTile) {
        int64_t const row = row0 + local_row;
        bool const inside = row < rows && k0 + local_k < k;
        tile[local_k][local_row] = inside ? ptx::to_float(a.values[row * k + k0 + local_k]) : 0.0f;
    }
}

template <typename Bytes>
__device__ __forceinline__ void load_e4m3_tile(GemmTile& tile, Bytes const& a, int64_t row0, int64_t rows, int64_t k0,
                                               int64_t k) {
    int const local_k = threadIdx.x % kGemmTile;
    for (int local_row = threadIdx.x / kGemmTile; local_row < kGemmTile; local_row += kGemmThreads / kGemmTile) {
        int64_t const row = row0 + local_row;
        bool const inside = row < rows && k0 + local_k < k;
        tile[local_k][local_row] = inside ? ptx::e4m3_decode(a.values[row * k + k0 + local_k]) : 0.0f;
    }
}

__device__ __forceinline__ void load_tile(GemmTile& tile, Fp8Rows const& a, int64_t row0, int64_t rows, int64_t k0,
                                          int64_t k) {
    load_e4m3_tile(tile, a, row0, rows, k0, k);
}

__device__ __forceinline__ void load_tile(GemmTile& tile, Fp8Channels const& w, int64_t row0, int64_t rows, int64_t k0,
                                          int64_t k) {
    load_e4m3_tile(tile, w, row0, rows, k0, k);
}

__device__ __forceinline__ float tensor_scale(Fp8Rows const& a) { return a.scale.resolve(); }
__device__ __forceinline__ float tensor_scale(Nvfp4Rows const& a) { return *a.tensor_scale; }
template <typename T>
__device__ __forceinline__ float tensor_scale(DenseRows<T> const&) {
    return 1.0f;
}

__device__ __forceinline__ float channel_scale(Nvfp4Rows const& w, int64_t) { return *w.tensor_scale; }
__device__ __forceinline__ float channel_scale(Fp8Channels const& w, int64_t channel) { return w.scales[channel]; }

// The tile at row0, column0, by one block.
template <typename A, typename T, typename Out, typename W>
__device__ __forceinline__ void gemm_tile(A const& a, GemmArgs<T, Out, W> const& args, int64_t row0, int64_t column0) {
    __shared__ GemmTile a_tile;
    __shared__ GemmTile w_tile;
    // Each thread owns 4 rows and 2 pairs of neighbouring columns: a pair is a gate with its up.
    int const thread_row = threadIdx.x / 16 * 4;
    int const thread_column = threadIdx.x % 16 * 2;

    float accumulators[4][4] = {};
    for (int64_t k0 = 0; k0 < args.k; k0 += kGemmTile) {
        load_tile(a_tile, a, row0, args.m, k0, args.k);
        load_tile(w_tile, args.w, column0, args.n, k0, args.k);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < kGemmTile; ++k) {
            float a_column[4], w_column[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a_column[i] = a_tile[k][thread_row + i];
                w_column[i] = w_tile[k][thread_column + i / 2 * 32 + i % 2];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) accumulators[i][j] = fmaf(a_column[i], w_column[j], accumulators[i][j]);
            }
        }
        __syncthreads();
    }

    float const a_scale = tensor_scale(a);
    int64_t const out_columns = args.gated ? args.n / 2 : args.n;
    auto const store = [&](int64_t row, int64_t column, float value) {
        int64_t const offset = row * out_columns + column;
        if (args.residual != nullptr) value += ptx::to_float(args.residual[offset]);
        args.out[offset] = ptx::from_float<Out>(value);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int64_t const row = row0 + thread_row + i;
        if (row >= args.m) break;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            int64_t const column = column0 + thread_column + pair * 32;
            if (column >= args.n) break;
            float const first = accumulators[i][2 * pair] * (a_scale * channel_scale(args.w, column)) +
                                ptx::to_float(args.bias[column]);
            if (args.gated) {
                float const up = accumulators[i][2 * pair + 1] * (a_scale * channel_scale(args.w, column + 1)) +
                                 ptx::to_float(args.bias[column + 1]);
                store(row, column / 2, gated_activate(args.activation, first, up, args.alpha, args.limit));
                continue;
            }
            store(row, column, activate(args.activation, first));
            if (column + 1 >= args.n) break;
            float const second = accumulators[i][2 * pair + 1] * (a_scale * channel_scale(args.w, column + 1)) +
                                 ptx::to_float(args.bias[column + 1]);
            store(row, column + 1, activate(args.activation, second));
        }
    }
}

template <typename A, typename T, typename Out, typename W>
__global__ __launch_bounds__(kGemmThreads) void generic_gemm(A a, GemmArgs<T, Out, W> args) {
    // Neighbouring blocks share the weights' tile.
    int64_t const tiles_m = (args.m + kGemmTile - 1) / kGemmTile;
    gemm_tile(a, args, blockIdx.x % tiles_m * kGemmTile, blockIdx.x / tiles_m * kGemmTile);
}

template <typename A, typename T, typename Out, typename W>
TrtNvfp4Status launch_gemm(A const& a, GemmArgs<T, Out, W> const& args, cudaStream_t stream) {
    int64_t const tiles = ((args.m + kGemmTile - 1) / kGemmTile) * ((args.n + kGemmTile - 1) / kGemmTile);
    return launch_kernel(generic_gemm<A, T, Out, W>, static_cast<unsigned>(tiles), kGemmThreads, 0, false, stream,
                         "generic_gemm", a, args);
}

}  // namespace trt_nvfp4
