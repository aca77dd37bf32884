// Weights on their way to wgmma by cp.async, in chunks of a warp's 32 rows.
#pragma once

#include "ptx/cp_async.cuh"
#include "scale_layout.cuh"
#include "sm90_w4a16_product.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarpRows = 32;
constexpr int kCodeBytes = kWarpRows * kChunk / 2;
constexpr int kStageBytes = kCodeBytes + kWarpRows * kChunk / kBlock;
constexpr int kPanelK = 128;  // values of K that arrive together

template <int kTokens>
constexpr int kPanelBytes = kPanelK * kTokens * 2;

// One lane's part of the copies of a warp's rows of a tile, chunk after chunk: 8 rows of each quarter of 128-row group
// `group`.
class WeightCopies {
 public:
    __device__ __forceinline__ WeightCopies() : chunk_(0), end_(0) {}

    __device__ __forceinline__ WeightCopies(uint8_t const* codes, uint8_t const* scales, int rows, int k, int group,
                                            int warp, int begin, int end)
        : chunk_(begin), end_(end), k_(k) {
        int const lane = threadIdx.x % 32;
        int const first_row = group * 128 + warp * 8 + lane / 8;
        rows_left_ = group * 128 < rows ? rows - first_row : kNoGroup;
        whole_ = group * 128 + 128 <= rows && k % kChunk == 0;
        code_ = codes + static_cast<int64_t>(first_row) * (k / 2) + lane % 8 * 16 + chunk_ * (kChunk / 2);
        int const scale_tiles = static_cast<int>(padded_blocks(k) / 4);
        scale_ = scales + (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 +
                 (warp * 8 + lane % 8) * 16;
    }

    __device__ __forceinline__ bool done() const { return chunk_ >= end_; }

    __device__ __forceinline__ void advance() {
        code_ += kChunk / 2;
        scale_ += 4 * 512;
        ++chunk_;
    }

    // The chunk to a stage. Copy i of a lane: the warp's row lane / 8 + 4 * (i % 2) in quarter i / 2, its 16-byte
    // column lane % 8. Neighbouring rows swap columns, so that load_group reads without bank conflicts.
    __device__ __forceinline__ void copy(uint32_t stage) const {
        int const lane = threadIdx.x % 32;
        uint32_t const row = stage + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 * 2)) * 16;
        uint32_t const scale = stage + kCodeBytes + lane * 16;
        int const pitch = k_ / 2;
        if (whole_) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                ptx::cp_async_16(row + i * 4 * (kChunk / 2), code_ + static_cast<int64_t>(pitch) * offset(i));
            }
            ptx::cp_async_16(scale, scale_);
        } else {
            // Zeros where rows or K end.
            bool const inside = chunk_ * kChunk + lane % 8 * 32 < k_;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                bool const valid = inside && offset(i) < rows_left_;
                ptx::cp_async_16(row + i * 4 * (kChunk / 2),
                                 valid ? code_ + static_cast<int64_t>(pitch) * offset(i) : code_, valid);
            }
            ptx::cp_async_16(scale, scale_, (chunk_ * 4 + lane / 8) * 64 < k_ && rows_left_ != kNoGroup);
        }
    }

 private:
    static constexpr int kNoGroup = -128;  // rows_left_ of a group that exists is never so small

    // Of copy i's row from the lane's first.
    __device__ __forceinline__ int offset(int i) const { return i / 2 * 32 + i % 2 * 4; }

    int chunk_, end_, k_, rows_left_;
    bool whole_;
    uint8_t const* code_;
    uint8_t const* scale_;
};

__device__ __forceinline__ Codes load_group(uint8_t const* stage, int group) {
    int const g = threadIdx.x % 32 / 4;
    int const t = threadIdx.x % 4;
    int const column = (group * 2 + t / 2) ^ (g % 4 * 2);
    return load_codes(stage + kCodeBytes + (group * 8 + g) * 16, stage + g * (kChunk / 2) + column * 16 + t % 2 * 8,
                      8 * (kChunk / 2));
}

}  // namespace trt_nvfp4::sm90
