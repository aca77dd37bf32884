// Copies the activations of sm90_w4a16_moe.cuh from global to shared memory, by a warp: a lane for each row of a work
// item. Wide items have the same layout in both.
//
// Hidden values are awaited by the count of finished tiles or, where blocks share tiles evenly, by sentinels: there all
// blocks come to down at the same time, and wait for neither fences nor counters.
#pragma once

#include <type_traits>

#include "exchange/counts.cuh"
#include "w4a16/sm90/moe/schedule.cuh"

namespace trt_nvfp4::sm90 {

// BF16 x of wide work items becomes FP16 by one factor for all of a token, which sums of gate and up are multiplied by.
// Hidden values stay BF16: theirs would be known only once all are there.
template <typename T>
constexpr bool kXBecomesHalf = std::is_same_v<T, __nv_bfloat16>;

// Activations of a work item in global memory: staged tiles, chunk after chunk.
class ItemImage {
    using Column = ColumnStagedTile<8>;

 public:
    // Bytes of all work items together.
    static __host__ __device__ int64_t bytes(int64_t rows, int64_t items, int k) {
        return columns_of_items(rows, items) * chunks_of(k) * Column::kColumnBytes;
    }

    template <typename T>
    __device__ __forceinline__ ItemImage(Projection<T> const& matrix, int item, int first, int count)
        : data_(const_cast<uint8_t*>(matrix.x) +
                first_column(item, first) * chunks_of(matrix.k) * Column::kColumnBytes),
          chunk_bytes_(item_columns(count) * Column::kColumnBytes) {}

    __device__ __forceinline__ int chunk_bytes() const { return chunk_bytes_; }
    __device__ __forceinline__ uint8_t* chunk(int which) const {
        return data_ + static_cast<int64_t>(which) * chunk_bytes_;
    }
    // The unit of a column's first token.
    __device__ __forceinline__ uint8_t* unit(int which, int column) const {
        return chunk(which / kUnits) + column * Column::kColumnBytes + which % kUnits * Column::kUnitBytes;
    }

 private:
    static constexpr int kUnits = kChunk / 8;

    uint8_t* const data_;
    int const chunk_bytes_;
};

// Where a task's tokens have their factors, if they have any, and the shared address that they go to.
struct FactorCopy {
    float const* from = nullptr;
    uint32_t to = 0;
};

// By a warp. Factors arrive with the first chunk.
template <class TaskShared>
__device__ __forceinline__ void copy_chunks(TaskShared& shared, MixtureTask const& task, ItemImage const& image,
                                            FactorCopy const& factors, ReadyChunks& ready, w4a16::RingPosition& place) {
#pragma unroll 1
    for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(shared.kStagedTiles)) {
        ready.await(chunk);
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.stage]), place.round ^ 1);
        if (threadIdx.x % 32 == 0) {
            bool const has_factors = chunk == task.begin && factors.from != nullptr;
            int const bytes = has_factors ? item_columns(task.count) * 8 * static_cast<int>(sizeof(float)) : 0;
            shared.copy_staged_tile(place.stage, image.chunk(chunk), image.chunk_bytes(), bytes);
            if (has_factors) {
                ptx::bulk_copy(factors.to, factors.from, bytes, ptx::shared_address(&shared.full[place.stage]));
            }
        }
        __syncwarp();
    }
}

// Copies the activations of sm90_w4a16_moe.cuh from global to shared memory, by a warp: a lane for each row of a work
// item. Wide items have the same layout in both.
//
// Hidden values are awaited by the count of finished tiles or, where blocks share tiles evenly, by sentinels: there all
// blocks come to down at the same time, and wait for neither fences nor counters.

constexpr int kLandings = 4;  // staged tiles in flight whose values are flags

// A column's rows from where a lane's row is.
__device__ __forceinline__ void copy_rows(uint8_t* staged_tile, uint8_t const* from, int column, int count,
                                          uint32_t barrier) {
    int const lane = threadIdx.x % 32;
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, min(8, count - column * 8) * kRowBytes);
    __syncwarp();
    if (lane / 8 != column || lane >= count) return;
    ptx::bulk_copy(ptx::shared_address(staged_tile + lane % 8 * kRowBytes), from, kRowBytes, barrier);
}

// Whether a value of a staged tile's first rows is a sentinel.
__device__ __forceinline__ bool has_sentinel(uint8_t const* staged_tile, int rows) {
    int const lane = threadIdx.x % 32;
    bool sentinel = false;
#pragma unroll 1
    for (int row = 0; row < rows; ++row, staged_tile += kRowBytes) {
        sentinel |= w4a16::has_sentinel(reinterpret_cast<uint4 const*>(staged_tile)[lane]);
        if (lane >= kChunk / kRowFactorK) continue;
        sentinel |= *reinterpret_cast<uint32_t const*>(staged_tile + RowStagedTile<true>::factor_offset(lane)) == ~0u;
    }
    return __any_sync(0xffffffffu, sentinel);
}

// Copies a task's chunks of hidden values that carry sentinels. Each chunk is checked, and copied again until no value
// is a sentinel: the first chunk before the others are copied, because copies in vain hold up weights.
class FlagFetcher {
 public:
    template <class Shared>
    __device__ __forceinline__ void fetch(Shared& shared, uint8_t const* from, int chunks, int count,
                                          w4a16::RingPosition& place) {
        auto& task = shared.task;
        w4a16::RingPosition asked = place;
        int next = 0;
        auto const landed = [&](int chunk) { return ptx::shared_address(&shared.landed[chunk % kLandings]); };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, place.advance(task.kStagedTiles)) {
            int const end = chunk == 0 ? 1 : min(chunk + kLandings, chunks);
#pragma unroll 1
            for (; next < end; ++next, asked.advance(task.kStagedTiles)) {
                ptx::mbarrier_wait(ptx::shared_address(&task.empty[asked.stage]), asked.round ^ 1);
                copy_rows(task.staged_tiles[asked.stage], from + next * kRowBytes, 0, count, landed(next));
            }
            uint8_t* const staged_tile = task.staged_tiles[place.stage];
            while (true) {
                ptx::mbarrier_wait(landed(chunk), rounds_ >> chunk % kLandings & 1);
                rounds_ ^= 1u << chunk % kLandings;
                if (!has_sentinel(staged_tile, count)) break;
                copy_rows(staged_tile, from + chunk * kRowBytes, 0, count, landed(chunk));
            }
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&task.full[place.stage]));
            __syncwarp();
        }
    }

 private:
    uint32_t rounds_ = 0;  // a bit of each landing
};

template <typename T, class Shared>
__device__ __forceinline__ void fetch_activations(MixtureArgs<T> const& args, Shared& shared) {
    int const lane = threadIdx.x % 32;
    w4a16::RingPosition place;
    FlagFetcher flags;
    // What launches before this one wrote is now read by the copy engine.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    shared.queue.each([&](MixtureTask const& task, [[maybe_unused]] w4a16::RingPosition const& in_queue) {
        int const end = task.end, count = task.count, columns = item_columns(count);
        Projection<T> const& matrix = args.matrices[task.phase][task.segment];
        ReadyChunks ready(args.done_of(task.segment, task.item), args.matrices[kUp][task.segment].tiles_per_chunk(),
                          task.phase == kDown ? task.begin : end, end);
        if constexpr (Shared::kWide) {
            FactorCopy factors;
            if constexpr (Shared::kHasFactors) {
                if (task.phase == kUp) {
                    factors = {args.factors[task.segment] + first_column(task.item, task.first) * 8,
                               ptx::shared_address(shared.factors.of_task[in_queue.stage])};
                }
            }
            copy_chunks(shared.task, task, ItemImage(matrix, task.item, task.first, count), factors, ready, place);
            return;
        }
        int row = task.first + min(lane, count - 1);
        if (task.phase == kUp && task.segment == kRouted && !args.scale_input) {
            row = args.plan.order[row] / args.top_k;
        }
        uint8_t const* from = RowImage<T>(matrix.x, matrix.k).chunk(task.begin, row);
        if (Shared::kEven && task.phase == kDown) {
            flags.fetch(shared, from, end - task.begin, count, place);
            return;
        }
#pragma unroll 1
        for (int chunk = task.begin; chunk < end; ++chunk, from += kRowBytes) {
            ready.await(chunk);
#pragma unroll 1
            for (int column = 0; column < columns; ++column, place.advance(shared.task.kStagedTiles)) {
                ptx::mbarrier_wait(ptx::shared_address(&shared.task.empty[place.stage]), place.round ^ 1);
                copy_rows(shared.task.staged_tiles[place.stage], from, column, count,
                          ptx::shared_address(&shared.task.full[place.stage]));
            }
        }
        __syncwarp();
    });
}

}  // namespace trt_nvfp4::sm90
