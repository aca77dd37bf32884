// FP8 GEMM by mma.sync, for SM89, and for SM120 where it falls back to FP8: operands by cp.async through a ring of
// stages in shared memory, fragments by ldmatrix, the same end of a tile as on Hopper.
#pragma once

#include "common/programmatic_launch.cuh"
#include "fp8/fp8_epilogue.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"

namespace trt_nvfp4::sm89 {

constexpr int kStepK = 64;  // bytes of a row in a stage
constexpr int kChunk = 16;  // bytes of a copy
constexpr int kThreads = 32 * kFp8Warps;

// A tile of rows x columns by four warps, two by two.
template <int kRows_, int kColumns_>
struct Config {
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kWarpRows = kRows / 2;
    static constexpr int kWarpColumns = kColumns / 2;
    static constexpr int kStageBytes = (kRows + kColumns) * kStepK;
    static constexpr int kStages = 48 * 1024 / kStageBytes;  // what a block may have without asking, and two fit an SM
};

// Chunks of a row are permuted so that the 8 rows that ldmatrix reads at a time lie in different banks.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return row * kStepK + (chunk ^ row / 2 % 4) * kChunk;
}

// Rows [row0, row0 + kRows) x bytes [k0, k0 + kStepK) of [rows, k], zeros outside [.., k_end).
template <int kRows>
__device__ __forceinline__ void load_rows(uint32_t stage, uint8_t const* values, int k, int row0, int rows, int k0,
                                          int k_end) {
    constexpr int kRowsAtATime = kThreads / (kStepK / kChunk);
    int const chunk = threadIdx.x % (kStepK / kChunk);
    int const at = k0 + chunk * kChunk;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtATime) {
        int const row = i + threadIdx.x / (kStepK / kChunk);
        bool const inside = row0 + row < rows && at < k_end;
        ptx::cp_async_16(stage + chunk_offset(row, chunk), inside ? values + int64_t{row0 + row} * k + at : values,
                         inside);
    }
}

template <class Output, class Config>
__global__ __launch_bounds__(kThreads, 2) void fp8_gemm(__grid_constant__ Fp8Gemm const gemm) {
    // The amax pass ends at once where the hidden scale is given: only the device knows.
    if (gemm.amax_pass && *gemm.hidden_scale.given != 0.0f) return;
    constexpr int kStrips = Config::kWarpRows / 16;
    constexpr int kCount = kStrips * Config::kWarpColumns / 2;
    using Finish = Fp8Finish<Output, Config::kWarpColumns, kStrips, 16>;
    extern __shared__ __align__(128) uint8_t fp8_shared[];
    static_assert(kFp8Warps * sizeof(typename Finish::Staged) <= Config::kStages * Config::kStageBytes, "fits");

    int const m = static_cast<int>(gemm.m);
    int const n = static_cast<int>(gemm.n);
    // Tiles that share weights run together, so that weights are read from memory once.
    int const tiles_m = (m + Config::kRows - 1) / Config::kRows;
    int const row0 = static_cast<int>(blockIdx.x) % tiles_m * Config::kRows;
    int const column0 = static_cast<int>(blockIdx.x) / tiles_m * Config::kColumns;
    int const split = static_cast<int>(blockIdx.y);
    int const k = static_cast<int>(gemm.k);
    int const k_begin = split * (k / gemm.splits);
    int const k_end = k_begin + k / gemm.splits;
    int const steps = (k_end - k_begin + kStepK - 1) / kStepK;

    uint32_t const shared = ptx::shared_address(fp8_shared);
    auto const load = [&](int step) {
        if (step < steps) {
            uint32_t const stage = shared + step % Config::kStages * Config::kStageBytes;
            int const k0 = k_begin + step * kStepK;
            load_rows<Config::kRows>(stage, gemm.a.values, k, row0, m, k0, k_end);
            load_rows<Config::kColumns>(stage + Config::kRows * kStepK, gemm.w.values, k, column0, n, k0, k_end);
        }
        ptx::cp_async_commit();
    };

    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const warp_row = warp / 2 * Config::kWarpRows;
    int const warp_column = warp % 2 * Config::kWarpColumns;
    // Rows and chunks of the matrices that a lane addresses: of A row halves first, of W chunks first.
    int const a_row = warp_row + lane % 16;
    int const a_chunk = lane / 16;
    int const w_row = warp_column + lane % 8 + lane / 16 * 8;
    int const w_chunk = lane / 8 % 2;

    float sums[kCount] = {};
    for (int step = 0; step < Config::kStages - 1; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<Config::kStages - 2>();
        __syncthreads();  // also: every warp is done with the stage that is loaded next
        load(step + Config::kStages - 1);
        uint32_t const a_stage = shared + step % Config::kStages * Config::kStageBytes;
        uint32_t const w_stage = a_stage + Config::kRows * kStepK;
#pragma unroll
        for (int chunk = 0; chunk < kStepK / kChunk; chunk += 2) {
            uint32_t a[kStrips][4];
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) {
                ptx::ldmatrix(a[strip], a_stage + chunk_offset(a_row + 16 * strip, a_chunk + chunk));
            }
#pragma unroll
            for (int column = 0; column < Config::kWarpColumns; column += 16) {
                uint32_t w[4];
                ptx::ldmatrix(w, w_stage + chunk_offset(w_row + column, w_chunk + chunk));
#pragma unroll
                for (int strip = 0; strip < kStrips; ++strip) {
                    float* const d = sums + (strip * Config::kWarpColumns + column) / 2;
                    ptx::mma_m16n8k32_e4m3(d, a[strip], w[0], w[1]);
                    ptx::mma_m16n8k32_e4m3(d + 4, a[strip], w[2], w[3]);
                }
            }
        }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stages make room for the epilogue

    if constexpr (Output::kSplits) {
        int64_t const part = int64_t{blockIdx.x} * kFp8Warps + warp;
        if (gemm.splits > 1 && !add_up_splits<kCount>(gemm, sums, part, split)) return;
    }
    Finish::run(gemm, sums, reinterpret_cast<typename Finish::Staged*>(fp8_shared)[warp], row0 + warp_row,
                column0 + warp_column);
}

template <class Output, class Config>
TrtNvfp4Status launch(Fp8Gemm const& gemm, cudaStream_t stream) {
    int64_t const tiles =
        (gemm.m + Config::kRows - 1) / Config::kRows * ((gemm.n + Config::kColumns - 1) / Config::kColumns);
    dim3 const grid(static_cast<unsigned>(tiles), static_cast<unsigned>(gemm.splits));
    return launch_kernel(fp8_gemm<Output, Config>, grid, kThreads, Config::kStages * Config::kStageBytes, false, stream,
                         "FP8 GEMM", gemm);
}

}  // namespace trt_nvfp4::sm89
