// Attention of few new tokens over long caches, bound by reading those. A block takes up to 16 rows of a KV head, all
// heads that share it, and a part of one sequence's keys (shares.cuh). Each warp streams its own blocks of keys and
// values through shared memory by cp.async, waits for no other warp, and multiplies by mma.sync; at the end the warps'
// sums are added in a fixed order. Where one block has all rows of a KV head it also prepares queries and appends keys
// and values, while the first old keys are in flight.
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
    // Pitch of a warp's sums, in place of its stages: eight rows on banks of their own.
    static constexpr int kSumPitch = kHeadDim + 8;
    static constexpr int kQueryBytes = kRows * kQueryPitch<kHeadDim>;
    static constexpr int kSharedBytes = kQueryBytes + kWarps * kWarpBytes;
    static constexpr int kMostBlocks = kHeadDim > 64 ? 2 : 3;  // on an SM, by registers
    static_assert(kWarpBytes >= kRows * kSumPitch * 4, "a warp's sums take the place of its stages");
};

// What a block has to do, whoever asks.
struct DecodeItem {
    Share share;
    int past, begin, end;  // keys
    uint64_t cached;       // bytes in front of the first key of the sequence's

    template <typename T>
    __device__ __forceinline__ DecodeItem(Args<T> const& args, int slots, int kv_head, int block_keys, int row_bytes)
        : share(find_share(args, slots, block_keys, [](int, int first, int splits) {
              int const slot = blockIdx.x;
              return first <= slot && slot < first + splits;
          })) {
        if (share.batch < 0) return;
        Sequence const sequence(args, share.batch);
        int const key_blocks = (sequence.keys() + block_keys - 1) / block_keys;
        int const split = static_cast<int>(blockIdx.x) - share.first_slot;
        auto const border = [&](int index) {
            return min(sequence.first + share_of(key_blocks, index, share.splits) * block_keys, sequence.length);
        };
        past = sequence.past;
        begin = border(split);
        end = border(split + 1);
        cached = cache_row(args, share.batch, kv_head, 0) * row_bytes;
    }
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

    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const chunks = (args.rows() + kRows - 1) / kRows;
    int const kv_head = blockIdx.y / chunks, row0 = blockIdx.y % chunks * kRows;
    int const rows = min(args.rows() - row0, kRows);
    int const row_bytes = args.head_dim * (kFp8 ? 1 : 2);
    wait_for_kernels_before();
    DecodeItem const item(args, partials.slots, kv_head, Config::kKeys, row_bytes);
    let_next_kernel_start();
    Share const share = item.share;
    if (share.batch < 0) return;
    int const past = item.past, begin = item.begin, end = item.end, slot = blockIdx.x;

    // Stages of this warp.
    uint32_t const query_tile = ptx::shared_address(shared);
    uint32_t const stages = query_tile + Config::kQueryBytes + warp * Config::kWarpBytes;
    auto const first_key = [&](int i) { return begin + (i * Config::kWarps + warp) * Config::kKeys; };
    auto const load = [&](int i) {
        int const key = first_key(i);
        if (key < end) {
            uint64_t const offset = item.cached + static_cast<uint64_t>(key) * row_bytes;
            uint32_t const stage = stages + i % Config::kStages * Config::kStageBytes;
            auto const copy = [&](uint32_t tile, void const* cache) {
                copy_tile<kFp8, kHeadDim, Config::kKeys, 32>(tile, static_cast<uint8_t const*>(cache) + offset,
                                                             row_bytes, row_bytes, end - key, lane);
            };
            copy(stage, args.keys);
            copy(stage + Config::Sizes::kBytes, args.values);
        }
        ptx::cp_async_commit();
    };
    // Keys that were cached before the call need not wait for those that the block appends.
    int loaded = 0;
#pragma unroll 1
    while (loaded < Config::kStages && (queries != nullptr || first_key(loaded) + Config::kKeys <= past)) {
        load(loaded++);
    }

    // New keys and values first, since reading them back takes longest; then queries.
    int const first_new = max(begin, past), appended = queries == nullptr ? 2 * max(end - first_new, 0) : 0;
#pragma unroll 1
    for (int i = warp; i < appended + kRows; i += Config::kWarps) {
        int const query_row = i - appended;
        Op* const out = reinterpret_cast<Op*>(shared + query_row * kQueryPitch<kHeadDim>);
        if (queries != nullptr && query_row < rows) {
            int64_t const from = (int64_t{share.batch} * args.kv_heads + kv_head) * args.rows() + row0 + query_row;
#pragma unroll 1
            for (int d = lane; d < kHeadDim; d += 32) {
                out[d] = d < args.head_dim ? queries[from * args.head_dim + d] : ptx::from_float<Op>(0.0f);
            }
            continue;
        }
        bool const is_new = query_row < 0;
        int const token = is_new ? first_new - past + i / 2 : query_row / args.group;
        int const kv_index = kv_head + i % 2 * args.kv_heads;
        int const head = is_new ? args.heads + kv_index : kv_head * args.group + query_row % args.group;
        float values[Config::kLaneDims] = {};
        if (query_row < rows) head_row(values, args, given_row(args, share.batch, token, head), head, past + token);
        if (is_new) {
            store_row<Config::kLaneDims, kFp8>(args, values, share.batch, kv_index, past + token);
        } else {
            store_query<T, kFp8, true>(values, args.head_dim, out);
        }
    }
    __syncthreads();
#pragma unroll 1
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
    for (int half = 0; half < 2; ++half) positions[half] = past + (row0 + row + 8 * half) / args.group;
    int const earliest = past + row0 / args.group;
    bool const windowed = args.window > 0;

    Softmax softmax;
    float sums[1][kHeadDim / 8][4] = {};
#pragma unroll 1
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
#pragma unroll 1
    for (int r = warp; r < rows; r += Config::kWarps) {
        float largest = -INFINITY, weight = 0.0f;
        for (int w = 0; w < Config::kWarps; ++w) largest = fmaxf(largest, softmaxes[w][r].x);
        float shrinks[Config::kWarps];
        for (int w = 0; w < Config::kWarps; ++w) {
            shrinks[w] = largest == -INFINITY ? 0.0f : ptx::exp2(softmaxes[w][r].x - largest);
            weight += softmaxes[w][r].y * shrinks[w];
        }
        bool const whole = share.splits == 1;
        Finish<T, kFp8> const finish(args, kv_head * args.group + (row0 + r) % args.group, largest, weight);
        T* const y = output_row(args, share.batch, kv_head, row0 + r);
        int64_t const place = partials.row(blockIdx.y, slot, r);
        if (!whole && lane == 0) partials.softmaxes[place] = make_float2(largest, weight);
#pragma unroll 1
        for (int i = lane; i < args.head_dim; i += 32) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < Config::kWarps; ++w) {
                auto const* const all =
                    reinterpret_cast<float const*>(shared + Config::kQueryBytes + w * Config::kWarpBytes);
                sum += all[r * Config::kSumPitch + i] * shrinks[w];
            }
            if (whole) {
                y[i] = ptx::from_float<T>(sum * finish.factor);
            } else {
                partials.values[place * args.head_dim + i] = sum;
            }
        }
    }
}

}  // namespace trt_nvfp4::attention
