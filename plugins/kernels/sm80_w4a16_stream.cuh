// The stream of weights that one warp multiplies, through every phase of a launch, and its ring in shared memory.
//
// Weights never depend on activations, so a warp's copies run ahead across tasks, layers and grid barriers: what the
// ring holds is what keeps the memory busy while the warps wait. Rings are private to a warp; no block-wide barrier
// touches them.
#pragma once

#include "heuristics/w4a16.h"
#include "ptx/cp_async.cuh"
#include "scale_layout.cuh"

namespace trt_nvfp4::w4a16 {

constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 32;  // of a warp: rows r..r+7 of each quarter of a 128-row group, so that scales come whole
constexpr int kTilesPerGroup = 128 / kTileRows;
constexpr int kChunk = 256;  // values of K in a stage
constexpr int kCodeBytes = kTileRows * kChunk / 2;
constexpr int kStageBytes = kCodeBytes + kTileRows * kChunk / kBlock;

// One projection, for all layers. A block's task is kWarps / k_groups tiles of rows by one of `splits` parts of K; the
// k_groups warps of a tile take its chunks in turn.
struct Projection {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    void const* bias;
    int64_t codes_per_layer, scales_per_layer;
    int rows, k;
    Split split;
    int tasks;

    __host__ __device__ int chunks() const { return (k + kChunk - 1) / kChunk; }
    __host__ __device__ int tiles() const { return (rows + 127) / 128 * kTilesPerGroup; }
};

// One warp's part of a task: chunks first, first + k_groups, ... below end of one tile.
struct WarpTask {
    int tile, k_group, split;
    int begin, end;  // the task's chunks

    __device__ __forceinline__ WarpTask(Projection const& p, int task) {
        int const warp = threadIdx.x / 32;
        split = task % p.split.splits;
        tile = task / p.split.splits * (kWarps / p.split.k_groups) + warp / p.split.k_groups;
        k_group = warp % p.split.k_groups;
        begin = split * p.chunks() / p.split.splits;
        end = (split + 1) * p.chunks() / p.split.splits;
    }
};

// Phases alternate between the launch's projections: up and down of layer 0, of layer 1, ...
template <int kProjections>
struct Program {
    Projection projections[kProjections];
    int first_phase, last_phase;  // half open
};

// The copies of a warp's stream into its ring. Stream holds what they follow: ring_, stages_ and stage_; of the tile
// that is open chunk_, end_, step_, pitch_, rows_left_, whole_, codes_, scales_ and k(); whether one is, is_open(), and
// advance() to the next.
template <typename Stream>
class StageCopies {
 public:
    // The next stage has arrived, and may be read until release().
    __device__ __forceinline__ int acquire() {
        static_assert(kMaxStages == 5, "a case per number of stages");
        switch (self().stages_) {
            case 1:
                ptx::cp_async_wait<0>();
                break;
            case 2:
                ptx::cp_async_wait<1>();
                break;
            case 3:
                ptx::cp_async_wait<2>();
                break;
            case 4:
                ptx::cp_async_wait<3>();
                break;
            default:
                ptx::cp_async_wait<4>();
        }
        __syncwarp();
        return self().stage_;
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        fetch(self().stage_);
        self().stage_ = self().stage_ + 1 == self().stages_ ? 0 : self().stage_ + 1;
    }

 protected:
    // Copy i of a lane: row 4 * (i % 2) + lane / 8 of quarter i / 2, its 16-byte column lane % 8. Neighbouring rows
    // swap columns, and scale tiles rotate, so that multiply_chunk reads without bank conflicts.
    __device__ __forceinline__ void fetch(int stage) {
        if (self().is_open()) {
            int const lane = threadIdx.x % 32;
            uint32_t const destination = self().ring_ + stage * kStageBytes;
            uint32_t const row = destination + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 & 1)) * 16;
            uint32_t const scale = destination + kCodeBytes + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 * 2)) * 16;
            if (self().whole_) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    ptx::cp_async_16(row + i * 4 * (kChunk / 2),
                                     self().codes_ + static_cast<int64_t>(self().pitch_) * offset(i));
                }
                ptx::cp_async_16(scale, self().scales_);
            } else {
                fetch_edge(row, scale);
            }
            self().codes_ += self().step_ * (kChunk / 2);
            self().scales_ += self().step_ * 2048;
            self().chunk_ += self().step_;
            if (self().chunk_ >= self().end_) self().advance();
        }
        ptx::cp_async_commit();
    }

    // Where rows or K end inside the tile: zeros beyond.
    __device__ __forceinline__ void fetch_edge(uint32_t row, uint32_t scale) {
        int const lane = threadIdx.x % 32;
        int const k = self().k();
        bool const inside = self().chunk_ * kChunk + lane % 8 * 32 < k;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            bool const valid = inside && offset(i) < self().rows_left_;
            ptx::cp_async_16(row + i * 4 * (kChunk / 2),
                             self().codes_ + static_cast<int64_t>(valid ? self().pitch_ : 0) * offset(i), valid);
        }
        ptx::cp_async_16(scale, self().scales_, (self().chunk_ * 4 + lane / 8) * 64 < k);
    }

    // Of copy i's row from the lane's first.
    static __device__ constexpr int offset(int i) { return i / 2 * 32 + i % 2 * 4; }

 private:
    __device__ __forceinline__ Stream& self() { return static_cast<Stream&>(*this); }
};

template <int kProjections>
class WeightStream : public StageCopies<WeightStream<kProjections>> {
 public:
    __device__ WeightStream(Program<kProjections> const& program, uint8_t* ring, int stages)
        : program_(program), ring_(ptx::shared_address(ring)), stages_(stages), phase_(program.first_phase - 1) {
        open_phase();
        for (int stage = 0; stage < stages; ++stage) this->fetch(stage);
    }

 private:
    friend class StageCopies<WeightStream>;

    __device__ __forceinline__ bool is_open() const { return phase_ < program_.last_phase; }
    __device__ __forceinline__ int k() const { return projection().k; }
    __device__ __forceinline__ void advance() {
        task_ += gridDim.x;
        if (!open_task()) open_phase();
    }

    __device__ __forceinline__ Projection const& projection() const {
        return program_.projections[phase_ % kProjections];
    }

    // To the first task of the next phase that has one for this warp.
    __device__ void open_phase() {
        while (++phase_ < program_.last_phase) {
            task_ = blockIdx.x;
            if (open_task()) return;
        }
    }

    // From task_ on, to the next task that has chunks for this warp.
    __device__ bool open_task() {
        Projection const& p = projection();
        for (; task_ < p.tasks; task_ += gridDim.x) {
            WarpTask const task(p, task_);
            chunk_ = task.begin + task.k_group;
            end_ = task.end;
            if (chunk_ >= end_ || task.tile >= p.tiles()) continue;
            int const lane = threadIdx.x % 32;
            int const layer = phase_ / kProjections;
            int const group = task.tile / kTilesPerGroup;
            int const row = task.tile % kTilesPerGroup * 8;
            step_ = p.split.k_groups;
            pitch_ = p.k / 2;
            whole_ = group * 128 + 128 <= p.rows && p.k % kChunk == 0;
            int const first_row = group * 128 + row + lane / 8;
            rows_left_ = p.rows - first_row;
            codes_ = p.codes + layer * p.codes_per_layer + static_cast<int64_t>(first_row) * pitch_ + lane % 8 * 16 +
                     chunk_ * (kChunk / 2);
            int const scale_tiles = static_cast<int>(padded_blocks(p.k) / 4);
            scales_ = p.scales + layer * p.scales_per_layer +
                      (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 + (row + lane % 8) * 16;
            return true;
        }
        return false;
    }

    Program<kProjections> const& program_;
    uint32_t const ring_;
    int const stages_;
    int stage_ = 0;
    int phase_, task_, chunk_, end_;
    int step_, pitch_, rows_left_;
    bool whole_;
    uint8_t const* codes_;
    uint8_t const* scales_;
};

}  // namespace trt_nvfp4::w4a16
