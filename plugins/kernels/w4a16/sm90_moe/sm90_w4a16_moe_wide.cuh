// Activations of wide jobs, which tensor cores read by themselves: in memory and on their way to panels.
#pragma once

#include <type_traits>

#include "w4a16/sm90/sm90_w4a16_counts.cuh"
#include "w4a16/sm90_moe/sm90_w4a16_moe_tasks.cuh"

namespace trt_nvfp4::sm90 {

// BF16 x of wide jobs becomes FP16 by one factor for all of a token, which sums of gate and up are multiplied by.
// Hidden values stay BF16: theirs would be known only once all are there.
template <typename T>
constexpr bool kXBecomesHalf = std::is_same_v<T, __nv_bfloat16>;

// Of a job: chunk after chunk what a panel has of it.
class JobImage {
    using Column = ColumnPanel<8>;

 public:
    // Of all jobs together.
    static __host__ __device__ int64_t bytes(int64_t rows, int64_t jobs, int k) {
        return columns_of_jobs(rows, jobs) * chunks_of(k) * Column::kColumnBytes;
    }

    template <typename T>
    __device__ __forceinline__ JobImage(Projection<T> const& matrix, int job, int first, int count)
        : data_(const_cast<uint8_t*>(matrix.x) + first_column(job, first) * chunks_of(matrix.k) * Column::kColumnBytes),
          chunk_bytes_(job_columns(count) * Column::kColumnBytes) {}

    __device__ __forceinline__ int chunk_bytes() const { return chunk_bytes_; }
    __device__ __forceinline__ uint8_t* chunk(int which) const {
        return data_ + static_cast<int64_t>(which) * chunk_bytes_;
    }
    // Of a column's first token.
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
__device__ __forceinline__ void copy_chunks(TaskShared& shared, MixtureTask const& task, JobImage const& image,
                                            FactorCopy const& factors, ReadyChunks& ready, w4a16::RingPosition& place) {
#pragma unroll 1
    for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(shared.kPanels)) {
        ready.await(chunk);
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.stage]), place.round ^ 1);
        if (threadIdx.x % 32 == 0) {
            bool const has_factors = chunk == task.begin && factors.from != nullptr;
            int const bytes = has_factors ? job_columns(task.count) * 8 * static_cast<int>(sizeof(float)) : 0;
            shared.copy_panel(place.stage, image.chunk(chunk), image.chunk_bytes(), bytes);
            if (has_factors) {
                ptx::bulk_copy(factors.to, factors.from, bytes, ptx::shared_address(&shared.full[place.stage]));
            }
        }
        __syncwarp();
    }
}

}  // namespace trt_nvfp4::sm90
