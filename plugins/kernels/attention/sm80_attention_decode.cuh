// Attention of few new tokens over long caches, bound by reading those. A block takes up to 16 rows of a KV head, all
// heads that share it, and a part of one sequence's keys (shares.cuh). Each warp streams its own blocks of keys and
// values through shared memory by cp.async, waits for no other warp, and multiplies by mma.sync; at the end the warps'
// sums are added in a fixed order. Where one block has all rows of a KV head it also prepares queries and appends keys
// and values, while the first old keys are under way.
#pragma once

#include "attention/head_row.cuh"
#include "attention/partials.cuh"
#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::attention {

template <typename T, bool kFp8, int kHeadDim>
struct Decode {
    static constexpr int kWarps = kHeadDim > 128 ? 2 : 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kKeys = kFp8 ? 32 : 16;  // of a block
    static constexpr int kStages = 2;
    using Sizes = Tile<kFp8, kHeadDim, kKeys>;
    static constexpr int kStageBytes = 2 * Sizes::kBytes;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kLaneDims = kHeadDim / 32;
    // Of a warp's sums, in place of its stages: eight rows on banks of their own.
    static constexpr int kSumPitch = kHeadDim + 8;
    static constexpr int kQueryBytes = kRows * kQueryPitch<kHeadDim>;
    static constexpr int kSharedBytes = kQueryBytes + kWarps * kWarpBytes;
    static constexpr int kMostBlocks = kHeadDim > 64 ? 2 : 3;  // on an SM, by registers
    static_assert(kWarpBytes >= kRows * kSumPitch * 4, "a warp's sums take the place of its stages");
};

// `queries` null: rows <= kRows, and the kernel prepares them and appends. Else both are done (prepare.cuh), and
// blockIdx.y counts kRows of a KV head at a time.
template <typename T, bool kFp8, int kHeadDim>
__global__ __launch_bounds__(
    Decode<T, kFp8, kHeadDim>::kThreads,
    Decode<T, kFp8, kHeadDim>::kMostBlocks) void sm80_attention_decode(Args<T> args, Operand<T, kFp8> const* queries,
                                                                       Partials partials) {
    using Config = Decode<T, kFp8, kHeadDim>;
    using Op = Operand<T, kFp8>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float2 softmaxes[Config::kWarps][kRows];
    wait_for_kernels_before();
    let_next_kernel_start();

    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const chunks = (args.rows() + kRows - 1) / kRows;
    int const kv_head = blockIdx.y / chunks, row0 = blockIdx.y % chunks * kRows;
    int const rows = min(args.rows() - row0, kRows);
    int const slot = blockIdx.x;
    Share const share = find_share(args, partials.slots, Config::kKeys,
                                   [&](int, int first, int splits) { return first <= slot && slot < first + splits; });
    if (share.batch < 0) return;
    Sequence const sequence(args, share.batch);
    int const key_blocks = (sequence.keys() + Config::kKeys - 1) / Config::kKeys;
    int const split = slot - share.first_slot;
    auto const border = [&](int index) {
        int const block = static_cast<int>(int64_t{key_blocks} * index / share.splits);
        return min(sequence.first + block * Config::kKeys, sequence.length);
    };
    int const begin = border(split), end = border(split + 1);

    // Stages of this warp.
    uint32_t const query_tile = ptx::shared_address(shared);
    uint32_t const stages = query_tile + Config::kQueryBytes + warp * Config::kWarpBytes;
    int const row_bytes = args.head_dim * (kFp8 ? 1 : 2);
    int64_t const cached = cache_row(args, share.batch, kv_head, 0) * row_bytes;
    auto const first_key = [&](int i) { return begin + (i * Config::kWarps + warp) * Config::kKeys; };
    auto const load = [&](int i) {
        int const key = first_key(i);
        if (key < end) {
            int64_t const offset = cached + int64_t{key} * row_bytes;
            uint32_t const stage = stages + i % Config::kStages * Config::kStageBytes;
            auto const copy = [&](uint32_t tile, void const* cache) {
                copy_tile<kFp8, kHeadDim, Config::kKeys, 32>(tile, static_cast<uint8_t const*>(cache) + offset,
                                                             row_bytes, end - key, lane);
            };
            copy(stage, args.keys);
            copy(stage + Config::Sizes::kBytes, args.values);
        }
        ptx::cp_async_commit();
    };
    // Keys that were cached before the call need not wait for those that the block appends.
    int loaded = 0;
    while (loaded < Config::kStages && (queries != nullptr || first_key(loaded) + Config::kKeys <= sequence.past)) {
        load(loaded++);
    }

    // New keys and values first: reading them back takes longest.
    if (queries == nullptr) {
        int const first_new = max(begin, sequence.past);
        for (int job = warp; job < 2 * (end - first_new); job += Config::kWarps) {
            int const position = first_new + job / 2, kv_index = kv_head + job % 2 * args.kv_heads;
            T const* const x = given_row(args, share.batch, position - sequence.past, args.heads + kv_index);
            append_row<Config::kLaneDims, kFp8>(args, x, share.batch, kv_index, position);
        }
    }
    for (int row = Config::kWarps - 1 - warp; row < kRows; row += Config::kWarps) {
        Op* const out = reinterpret_cast<Op*>(shared + row * kQueryPitch<kHeadDim>);
        if (row < rows && queries != nullptr) {
            int64_t const from = (int64_t{share.batch} * args.kv_heads + kv_head) * args.rows() + row0 + row;
            for (int i = lane; i < kHeadDim; i += 32) {
                out[i] = i < args.head_dim ? queries[from * args.head_dim + i] : ptx::from_float<Op>(0.0f);
            }
            continue;
        }
        float query[Config::kLaneDims] = {};
        if (row < rows) {
            int const token = row / args.group, head = kv_head * args.group + row % args.group;
            head_row(query, args, given_row(args, share.batch, token, head), head, sequence.past + token);
        }
        store_query<T, kFp8, true>(query, args.head_dim, out);
    }
    __syncthreads();
    while (loaded < Config::kStages) load(loaded++);

    auto const query_of = [&](int step, uint32_t (&a)[4]) { load_query(a, query_tile, kQueryPitch<kHeadDim>, step); };
    constexpr int kKept = kHeadDim > 128 ? 1 : kHeadDim / 16;  // of a longer head they are read again and again
    uint32_t kept[kKept][4];
    if constexpr (kHeadDim <= 128) {
#pragma unroll
        for (int step = 0; step < kKept; ++step) query_of(step, kept[step]);
    }
    ScoreScale const scale(args, kv_head, kFp8);
    int const row = lane / 4, column = lane % 4 * 2;
    int positions[2];
    for (int half = 0; half < 2; ++half) positions[half] = sequence.past + (row0 + row + 8 * half) / args.group;
    int const earliest = sequence.past + row0 / args.group;
    bool const windowed = args.window > 0;

    Softmax softmax;
    float sums[1][kHeadDim / 8][4] = {};
    for (int i = 0; first_key(i) < end; ++i) {
        ptx::cp_async_wait<Config::kStages - 1>();
        __syncwarp();
        uint32_t const stage = stages + i % Config::kStages * Config::kStageBytes;
        float scores[1][Config::kKeys / 8][4] = {};
        multiply_keys<T, kFp8, kHeadDim, Config::kKeys, 1>(scores, stage, [&](int, int step, uint32_t (&a)[4]) {
            if constexpr (kHeadDim <= 128) {
                for (int j = 0; j < 4; ++j) a[j] = kept[step][j];
            } else {
                query_of(step, a);
            }
        });
        int const key0 = first_key(i);
        bool const all = !windowed && key0 + Config::kKeys <= min(end, earliest + 1);
        softmax.update(scores[0], sums[0], scale, all, [&](int offset, int half) {
            int const key = key0 + column + offset;
            return key < end && visible(key, positions[half], args.window);
        });
        multiply_values<T, kFp8, kHeadDim, Config::kKeys, 1>(sums, scores, stage + Config::Sizes::kBytes);
        __syncwarp();
        load(i + Config::kStages);
    }
    ptx::cp_async_wait<0>();
    __syncwarp();

    // The warp's sums, in its own stages.
    float* const own = reinterpret_cast<float*>(shared + Config::kQueryBytes + warp * Config::kWarpBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float const weight = quad_sum(softmax.weight[half]);
        if (lane % 4 == 0) softmaxes[warp][row + 8 * half] = make_float2(softmax.top(half, scale), weight);
        if (row + 8 * half >= rows) continue;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            for (int c = 0; c < 2; ++c) {
                own[(row + 8 * half) * Config::kSumPitch + output_column<kFp8>(n, column + c)] =
                    sums[0][n][2 * half + c];
            }
        }
    }
    __syncthreads();
    for (int r = warp; r < rows; r += Config::kWarps) {
        float largest = -INFINITY, weight = 0.0f;
        for (int w = 0; w < Config::kWarps; ++w) largest = fmaxf(largest, softmaxes[w][r].x);
        float shrinks[Config::kWarps];
        for (int w = 0; w < Config::kWarps; ++w) {
            shrinks[w] = largest == -INFINITY ? 0.0f : ptx::exp2(softmaxes[w][r].x - largest);
            weight += softmaxes[w][r].y * shrinks[w];
        }
        auto const sum_of = [&](int i) {
            float sum = 0.0f;
            for (int w = 0; w < Config::kWarps; ++w) {
                auto const* const all =
                    reinterpret_cast<float const*>(shared + Config::kQueryBytes + w * Config::kWarpBytes);
                sum += all[r * Config::kSumPitch + i] * shrinks[w];
            }
            return sum;
        };
        if (share.splits == 1) {
            int const head = kv_head * args.group + (row0 + r) % args.group;
            Finish<T, kFp8> const finish(args, head, largest, weight);
            T* const y = output_row(args, share.batch, kv_head, row0 + r);
            for (int i = lane; i < args.head_dim; i += 32) y[i] = ptx::from_float<T>(sum_of(i) * finish.factor);
        } else {
            int64_t const place = partials.row(blockIdx.y, slot, r);
            if (lane == 0) partials.softmaxes[place] = make_float2(largest, weight);
            for (int i = lane; i < args.head_dim; i += 32) partials.values[place * args.head_dim + i] = sum_of(i);
        }
    }
}

}  // namespace trt_nvfp4::attention
