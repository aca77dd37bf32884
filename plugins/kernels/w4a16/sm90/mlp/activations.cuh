// Activations of sm90_w4a16_mlp.cuh in flight from images to staged tiles, by the producer warps.
//
// One warp asks the copy engine for what has been counted, beyond 16 tokens for both blocks of a cluster at once. Where
// values are flags, warps take turns with chunks: a copy is looked at, and made anew until no value is a sentinel
// (faster than to read the values from L2, one by one, before they are copied, but where there is one for each lane: of
// one token). BF16 values become FP16 there, and one token's integers.
#pragma once

#include "formats/fixed_point.cuh"
#include "ptx/elect.cuh"
#include "w4a16/sm90/common/task.cuh"
#include "w4a16/sm90/mlp/rows.cuh"

namespace trt_nvfp4::sm90 {

template <int kTokens>
constexpr int kMlpSharers = kValuesAreFlags<kTokens> ? 1 : kMaxCluster;

constexpr int kStagers = 3;  // warps

// Tokens of a tile's hidden values that lie in shared memory at once: as many as there is room for.
template <int kTokens>
constexpr int kStagedTokens = std::min(kSumTokens<kTokens>, 32);

template <typename T, int kTokens>
using MlpStagedTile =
    std::conditional_t<kTokens == 1, TokenStagedTile, ImageStagedTile<kTokens, kBecomesHalf<T, kTokens>>>;
template <typename T, int kTokens>
using MlpTaskShared = TaskShared<MlpStagedTile<T, kTokens>, kBySync<kTokens>, kMlpSharers<kTokens>>;

template <typename T, int kTokens>
struct MlpShared {
    MlpTaskShared<T, kTokens> task;
    __align__(16) uint8_t staged[kTileRows * kStagedTokens<kTokens> * 2];
    uint64_t landed[kStagers];
    uint32_t begun;  // tasks whose first activations are there

    // By one thread, before anything else.
    __device__ __forceinline__ void init() {
        for (uint64_t& barrier : landed) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
        begun = 0;
        task.init(kValuesAreFlags<kTokens> ? 32 : 1);
    }

    // By a lane.
    __device__ __forceinline__ void count_task() {
        asm volatile("red.relaxed.cta.shared.add.u32 [%0], 1;" ::"r"(ptx::shared_address(&begun)) : "memory");
    }
    // Returns once there have been so many.
    __device__ __forceinline__ void await_tasks(uint32_t tasks) {
        uint32_t seen;
        do {
            asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];"
                         : "=r"(seen)
                         : "r"(ptx::shared_address(&begun))
                         : "memory");
        } while (seen < tasks);
    }
};

// Calls f(phase, matrix, task) for the tasks of this block, phase after phase.
template <typename T, typename F>
__device__ __forceinline__ void for_tasks(MlpArgs<T> const& args, int first_phase, int end_phase, F&& f) {
    int const step = gridDim.x / kMaxCluster;
#pragma unroll 1
    for (int phase = first_phase; phase < end_phase; ++phase) {
        Projection<T> const& matrix = phase % 2 == 0 ? args.up : args.down;
        int const tasks = args.tasks[phase % 2];
#pragma unroll 1
        for (int index = blockIdx.x / kMaxCluster; index < tasks; index += step) {
            f(phase, matrix, Task(matrix.split.splits, args.splits[phase % 2], chunks_of(matrix.k), index));
        }
    }
}

// By a warp.
template <typename T, int kTokens>
__device__ __forceinline__ void fetch_activations(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared) {
    static_assert(kMlpSharers<kTokens> == kMaxCluster);
    constexpr int kSlice = kChunkBytes<kTokens> / kMaxCluster;  // this block's part of a staged tile
    auto& task_shared = shared.task;
    int const mine = ptx::cluster_rank() * kSlice;
    w4a16::RingPosition place;
    for_tasks(args, 0, 2 * args.layers, [&](int phase, Projection<T> const& matrix, Task const& task) {
        uint32_t const times = phase / 2 + 1;
        ReadyChunks ready =
            phase % 2 == 0
                ? ReadyChunks(args.counts.image, times * units_per_chunk<kTokens>(args.m), task.begin, task.end)
                : ReadyChunks(args.counts.hidden, times * args.up.tiles_per_chunk(), task.begin, task.end);
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
            uint32_t const full = ptx::shared_address(&task_shared.full[place.stage]);
            // Before the wait, behind which the copy then follows at once.
            if (ptx::elect()) {
                ptx::mbarrier_wait(ptx::shared_address(&task_shared.empty[place.stage]), place.round ^ 1);
                ptx::mbarrier_arrive_expect(full, kChunkBytes<kTokens>);
            }
            __syncwarp();
            ready.await(chunk);
            if (ptx::elect()) {
                if (chunk == task.begin) shared.count_task();
                ptx::bulk_copy_multicast(
                    ptx::shared_address(task_shared.staged_tiles[place.stage] + mine),
                    matrix.x_of(phase / 2) + static_cast<int64_t>(chunk) * kChunkBytes<kTokens> + mine, kSlice, full,
                    (1 << kMaxCluster) - 1);
            }
            __syncwarp();
            place.advance(task_shared.kStagedTiles);
        }
    });
}

// What a lane has of a staged tile: every 32nd eight of values, of eight tokens one's every fourth unit.
template <int kTokens>
struct StagedTilePart {
    static constexpr int kEights = kChunk / 8 * kTokens / 32;

    uint4 eights[kEights];

    static __device__ __forceinline__ uint4* place(uint8_t* staged_tile, int i) {
        return reinterpret_cast<uint4*>(staged_tile) + i * 32 + threadIdx.x % 32;
    }

    __device__ __forceinline__ void load(uint8_t* staged_tile) {
#pragma unroll
        for (int i = 0; i < kEights; ++i) eights[i] = *place(staged_tile, i);
    }
    // True if a value of the lane's is a sentinel.
    __device__ __forceinline__ bool has_sentinel() const {
        auto const* const pairs = reinterpret_cast<uint32_t const*>(eights);
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 4 * kEights; ++i) most = __vmaxu2(most, pairs[i]);
        return most >> 16 == 0xffffu || (most & 0xffffu) == 0xffffu;
    }
    // To the same staged tile, as FP16 with factors.
    __device__ __forceinline__ void store_halves(uint8_t* staged_tile) {
        static_assert(kTokens == 8);
        float const factor = to_half<8, 16>(eights);
#pragma unroll
        for (int i = 0; i < kEights; ++i) *place(staged_tile, i) = eights[i];
        if (threadIdx.x % 32 < kTokens) *reinterpret_cast<float*>(place(staged_tile, kEights)) = factor;
    }
};

// One token's chunk, which is short: read from where it lies until no value is a sentinel, a unit a lane.
template <typename T>
__device__ __forceinline__ void stage_token(uint8_t const* chunk, uint8_t* staged_tile) {
    int const lane = threadIdx.x % 32;
    uint4 unit;
    do {
        unit = w4a16::load_eight(chunk + lane * 16);
    } while (__any_sync(0xffffffffu, w4a16::has_sentinel_value(unit)));  // store_value writes them one by one
    FixedPoint const fixed(ptx::warp_max(greatest_of<T>(unit)));
    uint4 const integers = fixed.of<T>(unit);
    uint32_t const pairs[4] = {integers.x, integers.y, integers.z, integers.w};
#pragma unroll
    for (int t = 0; t < 4; ++t) *reinterpret_cast<uint32_t*>(staged_tile + TokenStagedTile::offset(lane, t)) = pairs[t];
    if (lane == 0) *reinterpret_cast<float*>(staged_tile + TokenStagedTile::factor_offset(0)) = fixed.factor();
}

// The same of values that are flags, by warp `turn` of kStagers.
template <typename T, int kTokens>
__device__ __forceinline__ void stage_activations(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared, int turn) {
    auto& task_shared = shared.task;
    static_assert(kStagers <= task_shared.kStagedTiles, "a barrier's parity would not tell a panel's rounds apart");
    uint32_t const landed = ptx::shared_address(&shared.landed[turn]);
    uint32_t round = 0, tasks = 0;
    w4a16::RingPosition place;
    for_tasks(args, 0, 2 * args.layers, [&](int phase, Projection<T> const& matrix, Task const& task) {
        uint8_t const* const image = matrix.x_of(phase / 2);
        ++tasks;
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(task_shared.kStagedTiles)) {
            if (turn-- > 0) continue;
            turn = kStagers - 1;
            // One asks for the task's first chunk, the others once it has been there: who asks in vain holds up
            // weights.
            if (chunk > task.begin) shared.await_tasks(tasks);
            ptx::mbarrier_wait(ptx::shared_address(&task_shared.empty[place.stage]), place.round ^ 1);
            uint8_t* const staged_tile = task_shared.staged_tiles[place.stage];
            uint8_t const* const values = image + int64_t{chunk} * kChunkBytes<kTokens>;
            if constexpr (kTokens == 1) {
                stage_token<T>(values, staged_tile);
            } else {
                // Behind what store_halves wrote there.
                if constexpr (kBecomesHalf<T, kTokens>) ptx::fence_async_proxy();
                StagedTilePart<kTokens> part;
                do {
                    __syncwarp();  // behind what other lanes have read
                    if (threadIdx.x % 32 == 0) {
                        ptx::mbarrier_arrive_expect(landed, kChunkBytes<kTokens>);
                        ptx::bulk_copy(ptx::shared_address(staged_tile), values, kChunkBytes<kTokens>, landed);
                    }
                    __syncwarp();
                    ptx::mbarrier_wait(landed, round);
                    round ^= 1;
                    part.load(staged_tile);
                } while (__any_sync(0xffffffffu, part.has_sentinel()));
                if constexpr (kBecomesHalf<T, kTokens>) part.store_halves(staged_tile);
            }
            ptx::mbarrier_arrive(ptx::shared_address(&task_shared.full[place.stage]));
            if (chunk == task.begin && threadIdx.x % 32 == 0) shared.count_task();
        }
    });
}

}  // namespace trt_nvfp4::sm90
