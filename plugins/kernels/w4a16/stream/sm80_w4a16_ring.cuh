// Weights in flight to the tensor cores: a ring in shared memory for every multiplying warp, filled by warps that do
// nothing else.
//
// Weights never depend on activations, so copies run ahead across tasks, layers and grid barriers, and what the rings
// hold keeps the tensor cores busy after a wait. Few copies are in flight at a time: what an SM asks of L2 queues
// behind them, and the blocks wait for each other's activations in that queue. 32 KB per SM reach 94 % of an H200's
// bandwidth at 1100 clocks for a hit in L2, 160 KB all of it at 6000 (benchmarks/notes).
#pragma once

#include "formats/scale_layout.cuh"
#include "heuristics/in_flight.h"
#include "heuristics/w4a16.h"
#include "ptx/mbarrier.cuh"

namespace trt_nvfp4::w4a16 {

constexpr int kTileRows = 32;  // of a warp: rows r..r+7 of each quarter of a 128-row group, so that scales come whole
constexpr int kTilesPerGroup = 128 / kTileRows;
constexpr int kChunk = 256;  // values of K in a stage
constexpr int kCodeBytes = kTileRows * kChunk / 2;
constexpr int kStageBytes = kCodeBytes + kTileRows * kChunk / kBlock;

// A place in a ring of stages, and how often, modulo two, the ring has been gone through.
struct RingPosition {
    int stage = 0;
    uint32_t round = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++stage < stages) return;
        stage = 0;
        round ^= 1;
    }
};

// The rings of a block's kRings multiplying warps: [stage][warp] of kStageBytes, and barriers, full and empty, of each.
template <int kRings>
struct Rings {
    static constexpr int kBarriers = 2 * kMaxStages * kRings;

    uint8_t* data;
    uint32_t address;  // the shared one of data
    uint32_t barriers;
    int stages;

    __device__ __forceinline__ Rings(uint8_t* data, uint64_t const* barriers, int stages)
        : data(data), address(ptx::shared_address(data)), barriers(ptx::shared_address(barriers)), stages(stages) {
        // Kept in registers: found anew for every stage, they take 1 % of the time.
        asm volatile("" : "+r"(this->address), "+r"(this->barriers));
    }

    // By one thread for each warp, before anything else. All lanes of a warp fill a stage, and all have read it.
    __device__ __forceinline__ void init(int warp) const {
        for (int stage = 0; stage < stages; ++stage) {
            ptx::mbarrier_init(full(warp, stage), 32);
            ptx::mbarrier_init(empty(warp, stage), 32);
        }
    }

    // A warp's next stage, once it has been filled; it may be read until release().
    __device__ __forceinline__ uint8_t const* acquire(int warp, RingPosition const& at) const {
        ptx::mbarrier_wait(full(warp, at.stage), at.round);
        return data + offset(warp, at.stage);
    }
    __device__ __forceinline__ void release(int warp, RingPosition& at) const {
        ptx::mbarrier_arrive(empty(warp, at.stage));
        at.advance(stages);
    }

    // The shared address of a warp's next stage, once it may be filled again; it is full when this warp's copies have
    // arrived.
    __device__ __forceinline__ uint32_t open(int warp, RingPosition const& at) const {
        ptx::mbarrier_wait(empty(warp, at.stage), at.round ^ 1);
        return address + offset(warp, at.stage);
    }
    __device__ __forceinline__ void close(int warp, RingPosition const& at) const {
        ptx::mbarrier_arrive_after_copies(full(warp, at.stage));
    }

 private:
    __device__ __forceinline__ uint32_t full(int warp, int stage) const {
        return barriers + (stage * kRings + warp) * 16;
    }
    __device__ __forceinline__ uint32_t empty(int warp, int stage) const { return full(warp, stage) + 8; }
    static __device__ __forceinline__ int offset(int warp, int stage) { return (stage * kRings + warp) * kStageBytes; }
};

// A matrix of weights and the tile and chunks of it that a warp multiplies: begin, begin + step, ... below end.
struct TilePlace {
    uint8_t const* codes;
    uint8_t const* scales;
    int rows, k;
    int tile, begin, end, step;
};

// One lane's part of the copies of a tile, in the order in which it is multiplied.
class TileCopies {
 public:
    __device__ __forceinline__ TileCopies() : chunk_(0), end_(0) {}

    // `whole_chunks`: K ends with a chunk, and more chunks may follow elsewhere.
    __device__ __forceinline__ explicit TileCopies(TilePlace const& place, bool whole_chunks = false)
        : chunk_(place.begin), end_(place.end), step_(place.step), k_(place.k) {
        int const lane = threadIdx.x % 32;
        int const group = place.tile / kTilesPerGroup;
        int const row = place.tile % kTilesPerGroup * 8;
        int const first_row = group * 128 + row + lane / 8;
        whole_end_ = group * 128 + 128 <= place.rows ? k_ / kChunk : 0;
        rows_left_ = place.rows - first_row;
        codes_ = place.codes + static_cast<int64_t>(first_row) * (k_ / 2) + lane % 8 * 16 + chunk_ * (kChunk / 2);
        int const scale_tiles = static_cast<int>(padded_blocks(k_) / 4);
        scales_ = place.scales + (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 +
                  (row + lane % 8) * 16;
        pitch_ = k_ / 2;
        if (whole_chunks) {
            k_ = place.end * kChunk;
            if (whole_end_ > 0) whole_end_ = place.end;
        }
    }

    // Copies the next chunk to a stage; false after the last. Copy i of a lane: row 4 * (i % 2) + lane / 8 of quarter i
    // / 2, its 16-byte column lane % 8. Neighbouring rows swap columns, and scale tiles rotate, so that they are read
    // without bank conflicts.
    __device__ __forceinline__ bool copy(uint32_t stage) {
        if (chunk_ >= end_) return false;
        int const lane = threadIdx.x % 32;
        uint32_t const row = stage + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 & 1)) * 16;
        uint32_t const scale = stage + kCodeBytes + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 * 2)) * 16;
        if (chunk_ < whole_end_) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                ptx::cp_async_16(row + i * 4 * (kChunk / 2), codes_ + static_cast<int64_t>(pitch_) * row_of(i));
            }
            ptx::cp_async_16(scale, scales_);
        } else {
            copy_edge(row, scale);
        }
        codes_ += step_ * (kChunk / 2);
        scales_ += step_ * 4 * 512;
        chunk_ += step_;
        return true;
    }

 protected:
    // To chunks that lie elsewhere.
    __device__ __forceinline__ void jump(int64_t codes, int64_t scales) {
        codes_ += codes;
        scales_ += scales;
    }

 private:
    // Where rows or K end inside the tile: zeros beyond.
    __device__ __forceinline__ void copy_edge(uint32_t row, uint32_t scale) const {
        int const lane = threadIdx.x % 32;
        bool const inside = chunk_ * kChunk + lane % 8 * 32 < k_;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            bool const valid = inside && row_of(i) < rows_left_;
            ptx::cp_async_16(row + i * 4 * (kChunk / 2), codes_ + static_cast<int64_t>(valid ? pitch_ : 0) * row_of(i),
                             valid);
        }
        ptx::cp_async_16(scale, scales_, (chunk_ * 4 + lane / 8) * 64 < k_);
    }

    // Row of copy i, from the lane's first.
    static __device__ constexpr int row_of(int i) { return i / 2 * 32 + i % 2 * 4; }

    int chunk_, end_, step_, k_, pitch_, rows_left_;
    int whole_end_;  // chunks before it have all rows and all values
    uint8_t const* codes_;
    uint8_t const* scales_;
};

// `value`, which is the same in all lanes of a warp, known to be: what follows from it takes uniform registers, and no
// loop over lanes that might differ.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Fills, by one warp, `steps` stages of the rings of kCopies warps from `first` on, each with the next chunk of its
// copies; where these have fewer chunks, stages hold nothing. At most kInFlight copies of a stage are in flight.
template <int kInFlight, typename Copies, int kCopies, int kRings>
__device__ __forceinline__ void fill(Rings<kRings> const& rings, RingPosition& at, int first, Copies (&copies)[kCopies],
                                     int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            bool const copied = copies[i].copy(rings.open(first + i, at));
            rings.close(first + i, at);
            if (!copied) continue;
            ptx::cp_async_commit();
            ptx::cp_async_wait<kInFlight - 1>();
        }
        at.advance(rings.stages);
    }
}

// What a warp keeps in flight for a linear of sm80_w4a16_phases.cuh: 37 or 74 KB of a block's.
constexpr int kFewInFlight = 2;
constexpr int kManyInFlight = 4;

// The same of 1 to kMostInFlight copies; where not kAll, of kFewInFlight or kManyInFlight, which keeps the code short.
template <bool kAll, typename Copies, int kCopies, int kRings>
__device__ __forceinline__ void fill(int in_flight, Rings<kRings> const& rings, RingPosition& at, int first,
                                     Copies (&copies)[kCopies], int steps) {
    static_assert(kFewInFlight == 2 && kManyInFlight == kMostInFlight);
    if (kAll && in_flight == 1) {
        fill<1>(rings, at, first, copies, steps);
    } else if (in_flight == kFewInFlight) {
        fill<kFewInFlight>(rings, at, first, copies, steps);
    } else if (kAll && in_flight == 3) {
        fill<3>(rings, at, first, copies, steps);
    } else {
        fill<kManyInFlight>(rings, at, first, copies, steps);
    }
}

}  // namespace trt_nvfp4::w4a16
