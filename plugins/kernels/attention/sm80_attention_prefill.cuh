// Attention of many new tokens: a block takes rows of a KV head, all heads that share it, token by token, and walks the
// keys that they attend to; the next keys and values are in flight while these are multiplied.
#pragma once

#include "attention/partials.cuh"
#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::attention {

template <typename T, bool kFp8, int kHeadDim>
struct Prefill {
    static constexpr int kThreads = 128;
    static constexpr int kMany = kHeadDim > 128 ? 1 : 2;  // of 16 rows for a warp
    static constexpr int kBlockRows = 64 * kMany;
    static constexpr int kKeys = kHeadDim > 64 ? 32 : 64;  // of a block: more spill registers
    using Sizes = Tile<kFp8, kHeadDim, kKeys>;
    static constexpr int kQueryBytes = kBlockRows * kQueryPitch<kHeadDim>;
    static constexpr int kStageBytes = 2 * Sizes::kBytes;
    static constexpr int kSharedBytes = kQueryBytes + 2 * kStageBytes;
};

template <typename T, bool kFp8, int kHeadDim>
__global__ __launch_bounds__(128, 2) void sm80_attention_prefill(Args<T> args, Operand<T, kFp8> const* queries) {
    using Config = Prefill<T, kFp8, kHeadDim>;
    constexpr int kMany = Config::kMany, kKeys = Config::kKeys;
    extern __shared__ __align__(16) uint8_t shared[];
    wait_for_kernels_before();
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The blocks with most keys first.
    int const row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Config::kBlockRows;
    int const kv_head = blockIdx.y, batch = blockIdx.z;
    int const rows = min(args.rows() - row0, Config::kBlockRows);
    Sequence const sequence(args, batch);
    int const earliest = sequence.past + row0 / args.group;
    int const latest = sequence.past + (row0 + rows - 1) / args.group;
    int const begin = args.window > 0 ? max(0, earliest - args.window + 1) : 0;
    int const end = min(latest + 1, sequence.length);

    uint32_t const query_tile = ptx::shared_address(shared);
    uint32_t const stages = query_tile + Config::kQueryBytes;
    int const row_bytes = args.head_dim * (kFp8 ? 1 : 2);
    int64_t const cached = cache_row(args, batch, kv_head, 0) * row_bytes;
    auto const load = [&](uint32_t stage, int key) {
        if (key < end) {
            int64_t const offset = cached + int64_t{key} * row_bytes;
            auto const copy = [&](uint32_t tile, void const* cache) {
                copy_tile<kFp8, kHeadDim, kKeys, Config::kThreads>(tile, static_cast<uint8_t const*>(cache) + offset,
                                                                   row_bytes, row_bytes, end - key, threadIdx.x);
            };
            copy(stage, args.keys);
            copy(stage + Config::Sizes::kBytes, args.values);
        }
        ptx::cp_async_commit();
    };
    auto const* const from =
        queries + ((int64_t{batch} * args.kv_heads + kv_head) * args.rows() + row0) * args.head_dim;
    constexpr int kUnits = kHeadDim / 8;
    for (int i = threadIdx.x; i < Config::kBlockRows * kUnits; i += Config::kThreads) {
        int const row = i / kUnits, unit = i % kUnits;
        bool const inside = row < rows && unit * 8 < args.head_dim;
        ptx::cp_async_16(query_tile + row * kQueryPitch<kHeadDim> + unit * 16,
                         inside ? from + int64_t{row} * args.head_dim + unit * 8 : from, inside);
    }
    load(stages, begin);

    ScoreScale const scale(args, kv_head, kFp8);
    int const column = lane % 4 * 2;
    auto const row_of = [](int thread) { return thread / 32 * 16 * kMany + thread % 32 / 4; };
    int const row = row_of(threadIdx.x);
    Softmax softmax[kMany];
    float sums[kMany][kHeadDim / 8][4] = {};
    uint32_t const own_queries = query_tile + warp * 16 * kMany * kQueryPitch<kHeadDim>;
    uint32_t stage = stages;
    for (int key0 = begin; key0 < end; key0 += kKeys) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // and all have done with the other stage
        uint32_t const other = 2 * stages + Config::kStageBytes - stage;
        load(other, key0 + kKeys);
        float scores[kMany][kKeys / 8][4] = {};
        multiply_keys<T, kFp8, kHeadDim, kKeys, kMany>(scores, stage, [&](int m, int step, uint32_t (&a)[4]) {
            load_query(a, own_queries + m * 16 * kQueryPitch<kHeadDim>, kQueryPitch<kHeadDim>, step);
        });
        bool const all = key0 + kKeys <= min(end, earliest + 1) && (args.window == 0 || key0 > latest - args.window);
#pragma unroll
        for (int m = 0; m < kMany; ++m) {
            int positions[2];
            for (int half = 0; half < 2; ++half) {
                positions[half] = all ? 0 : sequence.past + (row0 + row + 16 * m + 8 * half) / args.group;
            }
            softmax[m].update(scores[m], sums[m], scale, all, [&](int offset, int half) {
                int const key = key0 + column + offset;
                return key < end && visible(key, positions[half], args.window);
            });
        }
        multiply_values<T, kFp8, kHeadDim, kKeys, kMany>(sums, scores, stage + Config::Sizes::kBytes);
        stage = other;
    }
    ptx::cp_async_wait<0>();

    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // so that the row is found anew: kept through the loop, it would be spilled
#pragma unroll
    for (int m = 0; m < kMany; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const r = row_of(thread) + 16 * m + 8 * half;
            float const weight = quad_sum(softmax[m].weight[half]);
            if (r >= rows) continue;
            int const head = kv_head * args.group + (row0 + r) % args.group;
            Finish<T, kFp8> const finish(args, head, softmax[m].top(half, scale), weight);
            T* const y = output_row(args, batch, kv_head, row0 + r);
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                for (int c = 0; c < 2; ++c) {
                    int const i = output_column<kFp8>(n, column + c);
                    if (i < args.head_dim) y[i] = ptx::from_float<T>(sums[m][n][2 * half + c] * finish.factor);
                }
            }
        }
    }
}

}  // namespace trt_nvfp4::attention
