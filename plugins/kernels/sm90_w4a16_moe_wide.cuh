// Activations of wide jobs, which tensor cores read by themselves: in memory and on their way to panels.
#pragma once

#include "sm90_w4a16_counts.cuh"
#include "sm90_w4a16_moe_tasks.cuh"

namespace trt_nvfp4::sm90 {

// Of a job: chunk after chunk what a panel has of it. Jobs' places follow from their first pairs alone.
class JobImage {
    using Column = ColumnPanel<8>;

 public:
    // Of all jobs together.
    static __host__ __device__ int64_t bytes(int64_t rows, int64_t jobs, int k) {
        return (rows / 8 + jobs) * chunks_of(k) * Column::kColumnBytes;
    }

    template <typename T>
    __device__ __forceinline__ JobImage(Projection<T> const& matrix, int job, int first, int count)
        : data_(const_cast<uint8_t*>(matrix.x) +
                static_cast<int64_t>(first / 8 + job) * chunks_of(matrix.k) * Column::kColumnBytes),
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

// By a warp.
template <class TaskShared>
__device__ __forceinline__ void copy_chunks(TaskShared& shared, MixtureTask const& task, JobImage const& image,
                                            ReadyChunks& ready, w4a16::RingPosition& place) {
#pragma unroll 1
    for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(shared.kPanels)) {
        ready.await(chunk);
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.stage]), place.round ^ 1);
        if (threadIdx.x % 32 == 0) shared.copy_panel(place.stage, image.chunk(chunk), image.chunk_bytes());
        __syncwarp();
    }
}

}  // namespace trt_nvfp4::sm90
