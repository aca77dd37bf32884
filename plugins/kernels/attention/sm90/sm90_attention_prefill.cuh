// Attention of many new tokens on SM90: heads of 65 to 128 dimensions, caches in 16 bits. A block takes 128 rows of a
// KV head, all heads that share it, token by token, and walks the keys that they attend to. One warp asks for tiles of
// keys and values by the copy engine; two warpgroups have 64 rows each and multiply by wgmma. They do not wait for each
// other: one has the tensor cores while the other makes its probabilities. A warpgroup starts the products of the next
// keys before those of the values, so that these go on while it makes the next probabilities.
#pragma once

#include "attention/partials.cuh"
#include "common/programmatic_launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma_wide.cuh"

namespace trt_nvfp4::attention {

struct WidePrefill {
    static constexpr int kWarpgroups = 2;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);      // the last for one that asks for tiles
    static constexpr int kRegisters = 240, kFetchRegisters = 24;  // of each, of 3 * 168 together
    static constexpr int kHeadDim = 128;
    static constexpr int kBlockRows = 64 * kWarpgroups;
    static constexpr int kKeys = 128;  // of a tile
    static constexpr int kStages = 2;
    // Tiles are [halves of a head, rows, 128 bytes], swizzled: what lies where is the copy engine's to know.
    static constexpr int kLine = 128, kHalfDims = 64, kEightRows = 8 * kLine;
    static constexpr int kHalfBytes = kKeys * kLine, kTileBytes = 2 * kHalfBytes;
    static constexpr int kQueryHalfBytes = kBlockRows * kLine, kQueryBytes = 2 * kQueryHalfBytes;
    static constexpr int kAlignment = 1024;
    static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes + kAlignment;
};

// Tiles of queries [batch * kv_heads, rows, head_dim], and of keys and values [batch * kv_heads, capacity, head_dim].
struct PrefillMaps {
    CUtensorMap queries, keys, values;
};

// What a block does.
struct PrefillItem {
    int batch, kv_head, row0, rows;
    int past, length;
    int earliest, latest;  // positions of its rows
    int begin, end;        // keys
    int tiles;             // of keys

    template <typename T>
    __device__ __forceinline__ explicit PrefillItem(Args<T> const& args)
        : batch(blockIdx.z),
          kv_head(blockIdx.y),
          // The blocks with most keys first.
          row0(static_cast<int>(gridDim.x - 1 - blockIdx.x) * WidePrefill::kBlockRows),
          rows(min(args.rows() - row0, WidePrefill::kBlockRows)) {
        Sequence const sequence(args, batch);
        past = sequence.past;
        length = sequence.length;
        earliest = past + row0 / args.group;
        latest = past + (row0 + rows - 1) / args.group;
        begin = args.window > 0 ? max(0, earliest - args.window + 1) : 0;
        end = min(latest + 1, length);
        tiles = max(end - begin + WidePrefill::kKeys - 1, 0) / WidePrefill::kKeys;
    }
};

struct PrefillBarriers {
    uint64_t queries;
    uint64_t landed;  // of the tile of values that holds rows of no token
    uint64_t keys_full[WidePrefill::kStages], keys_empty[WidePrefill::kStages];
    uint64_t values_full[WidePrefill::kStages], values_empty[WidePrefill::kStages];
};

// By one warp.
template <typename T>
__device__ __forceinline__ void fetch_tiles(Args<T> const& args, PrefillMaps const& maps, PrefillItem const& item,
                                            PrefillBarriers& barriers, uint32_t base) {
    using Config = WidePrefill;
    bool const one = threadIdx.x % 32 == 0;
    int const z = item.batch * args.kv_heads + item.kv_head;
    auto const copy = [&](uint32_t tile, CUtensorMap const& map, int row, int half_bytes, uint64_t& barrier) {
        uint32_t const at = ptx::shared_address(&barrier);
        ptx::mbarrier_arrive_expect(at, 2 * half_bytes);
        ptx::tensor_copy<false>(tile, map, 0, row, z, at);
        ptx::tensor_copy<false>(tile + half_bytes, map, Config::kHalfDims, row, z, at);
    };
    if (one) copy(base, maps.queries, item.row0, Config::kQueryHalfBytes, barriers.queries);
    uint32_t const stages = base + Config::kQueryBytes;
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i) {
        int const stage = i % Config::kStages, key = item.begin + i * Config::kKeys;
        uint32_t const parity = i / Config::kStages % 2 ^ 1;
        uint32_t const keys = stages + 2 * stage * Config::kTileBytes, values = keys + Config::kTileBytes;
        ptx::mbarrier_wait(ptx::shared_address(&barriers.keys_empty[stage]), parity);
        if (one) copy(keys, maps.keys, key, Config::kHalfBytes, barriers.keys_full[stage]);
        ptx::mbarrier_wait(ptx::shared_address(&barriers.values_empty[stage]), parity);
        bool const whole = key + Config::kKeys <= item.length;
        if (one)
            copy(values, maps.values, key, Config::kHalfBytes, whole ? barriers.values_full[stage] : barriers.landed);
        if (whole) continue;
        // Whatever the cache holds behind the sequence is multiplied by probability 0, and no NaN may be.
        ptx::mbarrier_wait(ptx::shared_address(&barriers.landed), 0);
        int const first = item.length - key, units = (Config::kKeys - first) * Config::kLine / 16;
        for (int at = threadIdx.x % 32; at < 2 * units; at += 32) {
            int const half = at / units, unit = at % units;
            uint32_t const place = values + half * Config::kHalfBytes + first * Config::kLine + unit * 16;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0u) : "memory");
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (one) ptx::mbarrier_arrive(ptx::shared_address(&barriers.values_full[stage]));
    }
}

template <typename T>
struct PrefillRows {
    using Config = WidePrefill;
    static constexpr int kColumns = Config::kKeys / 8;
    float scores[kColumns][4];
    float sums[Config::kHeadDim / 8][4];
    uint32_t probabilities[Config::kKeys / 16][4];

    // Scores of a tile of keys are in flight.
    __device__ __forceinline__ void multiply_keys(uint64_t queries, uint64_t keys) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            int const of_half = step % 4 * 32, half = step / 4;
            uint64_t const a = ptx::advance(queries, half * Config::kQueryHalfBytes + of_half);
            uint64_t const b = ptx::advance(keys, half * Config::kHalfBytes + of_half);
            ptx::wgmma_of_shared<T>(scores, a, b, step > 0);
        }
        ptx::wgmma_commit();
    }
    // And the sums of a tile of values.
    __device__ __forceinline__ void multiply_values(uint64_t values) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            uint32_t const(&a)[4] = probabilities[step];
            ptx::wgmma_of_rows<T>(sums, a[0], a[1], a[2], a[3], ptx::advance(values, 2 * step * Config::kEightRows));
        }
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float const* const pair = &scores[2 * step + i / 2][i % 2 * 2];
                probabilities[step][i] = pack<T>(pair[0], pair[1]);
            }
        }
    }
};

// By a warpgroup.
template <typename T>
__device__ __forceinline__ void attend_rows(Args<T> const& args, PrefillItem const& item, PrefillBarriers& barriers,
                                            uint32_t base) {
    using Config = WidePrefill;
    int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    int const lane = threadIdx.x % 32;
    int const row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    ScoreScale const scale(args, item.kv_head, false);
    int positions[2];
    for (int half = 0; half < 2; ++half) positions[half] = item.past + (item.row0 + row + 8 * half) / args.group;
    Softmax softmax;
    PrefillRows<T> rows;
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.sums[n][i] = 0.0f;
    }
    uint64_t const queries = ptx::swizzled_descriptor(base + warpgroup * 64 * Config::kLine, 16, Config::kEightRows);
    uint64_t const stages =
        ptx::swizzled_descriptor(base + Config::kQueryBytes, Config::kHalfBytes, Config::kEightRows);
    auto const keys_of = [&](int i) { return ptx::advance(stages, i % Config::kStages * 2 * Config::kTileBytes); };
    auto const values_of = [&](int i) { return ptx::advance(keys_of(i), Config::kTileBytes); };
    auto const await = [&](uint64_t (&full)[Config::kStages], int i) {
        ptx::mbarrier_wait(ptx::shared_address(&full[i % Config::kStages]), i / Config::kStages % 2);
    };
    auto const release = [&](uint64_t (&empty)[Config::kStages], int i) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[i % Config::kStages]));
    };
    // Scores of tile i to probabilities; what the sums have to shrink by.
    auto const weigh = [&](int i, float (&shrink)[2]) {
        int const key0 = item.begin + i * Config::kKeys;
        bool const all = key0 + Config::kKeys <= min(item.end, item.earliest + 1) &&
                         (args.window == 0 || key0 > item.latest - args.window);
        softmax.weigh(rows.scores, scale, all, shrink, [&](int offset, int half) {
            int const key = key0 + column + offset;
            return key < item.end && visible(key, positions[half], args.window);
        });
    };

    ptx::mbarrier_wait(ptx::shared_address(&barriers.queries), 0);
    if (item.tiles > 0) {
        await(barriers.keys_full, 0);
        rows.multiply_keys(queries, keys_of(0));
        ptx::wgmma_wait<0>();
        ptx::wgmma_finished(rows.scores);
        release(barriers.keys_empty, 0);
    }
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i) {
        float shrink[2];
        weigh(i, shrink);
        ptx::wgmma_wait<0>();
        ptx::wgmma_finished(rows.sums);
        if (i > 0) release(barriers.values_empty, i - 1);
        Softmax::scale_down(rows.sums, shrink);
        rows.round_probabilities();
        if (i + 1 < item.tiles) {
            await(barriers.keys_full, i + 1);
            rows.multiply_keys(queries, keys_of(i + 1));
            await(barriers.values_full, i);
            rows.multiply_values(values_of(i));
            ptx::wgmma_wait<1>();
            ptx::wgmma_finished(rows.scores);
            release(barriers.keys_empty, i + 1);
        } else {
            await(barriers.values_full, i);
            rows.multiply_values(values_of(i));
        }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_finished(rows.sums);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const r = row + 8 * half;
        float const weight = quad_sum(softmax.weight[half]);
        if (r >= item.rows) continue;
        int const head = item.kv_head * args.group + (item.row0 + r) % args.group;
        Finish<T, false> const finish(args, head, softmax.top(half, scale), weight);
        T* const y = output_row(args, item.batch, item.kv_head, item.row0 + r);
#pragma unroll
        for (int n = 0; n < Config::kHeadDim / 8; ++n) {
            int const i = output_column<false>(n, column);
            float const* const pair = &rows.sums[n][2 * half];
            if (i < args.head_dim) {
                *reinterpret_cast<uint32_t*>(y + i) = pack<T>(pair[0] * finish.factor, pair[1] * finish.factor);
            }
        }
    }
}

template <typename T>
__global__ __launch_bounds__(WidePrefill::kThreads,
                             1) void sm90_attention_prefill(Args<T> args, __grid_constant__ PrefillMaps const maps) {
    using Config = WidePrefill;
    extern __shared__ uint8_t shared[];
    __shared__ PrefillBarriers barriers;
    uint32_t const base = (ptx::shared_address(shared) + Config::kAlignment - 1) & ~(Config::kAlignment - 1);
    if (threadIdx.x == 0) {
        auto const init = [](uint64_t& barrier, int arrivals) {
            ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
        };
        init(barriers.queries, 1);
        init(barriers.landed, 1);
        for (int i = 0; i < Config::kStages; ++i) {
            init(barriers.keys_full[i], 1);
            init(barriers.values_full[i], 1);
            init(barriers.keys_empty[i], 4 * Config::kWarpgroups);
            init(barriers.values_empty[i], 4 * Config::kWarpgroups);
        }
        ptx::mbarrier_init_fence();
        ptx::prefetch(maps.queries);
        ptx::prefetch(maps.keys);
        ptx::prefetch(maps.values);
    }
    __syncthreads();
    wait_for_kernels_before();
    PrefillItem const item(args);
    if (threadIdx.x >= 128 * Config::kWarpgroups) {
        ptx::give_registers<Config::kFetchRegisters>();
        if (threadIdx.x >= 128 * Config::kWarpgroups + 32) return;
        ptx::fence_async_proxy_global();  // of what the kernel before has written
        fetch_tiles(args, maps, item, barriers, base);
    } else {
        ptx::take_registers<Config::kRegisters>();
        attend_rows(args, item, barriers, base);
    }
}

}  // namespace trt_nvfp4::attention
