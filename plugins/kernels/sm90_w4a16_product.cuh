// Weights on their way to wgmma: copied in chunks of a warp's 32 rows, decoded in registers (operand A), multiplied by
// a panel of activations (operand B, sm90_w4a16_image.cuh).
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/wgmma.cuh"
#include "scale_layout.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm90_w4a16_image.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarpRows = 32;
constexpr int kCodeBytes = kWarpRows * kChunk / 2;
constexpr int kStageBytes = kCodeBytes + kWarpRows * kChunk / kBlock;
constexpr int kPanelK = 128;  // values of K that arrive together

template <int kTokens>
constexpr int kPanelBytes = kPanelK * kTokens * 2;

// The 8 rows that a warp has of each quarter of its warpgroup's 128. Where an image is written from gates and ups, they
// are chosen so that pairs of hidden values are one lane's.
struct WarpRows {
    int first, stride;

    __device__ __forceinline__ WarpRows(int warp, bool pairs) {
        warp %= 4;
        first = pairs ? warp / 2 * 16 + warp % 2 * 4 : warp * 8;
        stride = pairs ? 8 : 4;
    }
    __device__ __forceinline__ int operator()(int i) const { return first + i % 4 + i / 4 * stride; }
};

// One lane's part of the copies of a warp's rows of a tile, chunk after chunk. `group`: of 128 rows.
class WeightCopies {
 public:
    __device__ __forceinline__ WeightCopies() : chunk_(0), end_(0) {}

    __device__ __forceinline__ WeightCopies(uint8_t const* codes, uint8_t const* scales, int rows, int k, int group,
                                            WarpRows const& own, int begin, int end)
        : chunk_(begin), end_(end), k_(k), stride_(own.stride) {
        int const lane = threadIdx.x % 32;
        int const first_row = group * 128 + own(lane / 8);
        rows_left_ = group * 128 < rows ? rows - first_row : kNoGroup;
        whole_ = group * 128 + 128 <= rows && k % kChunk == 0;
        code_ = codes + static_cast<int64_t>(first_row) * (k / 2) + lane % 8 * 16 + chunk_ * (kChunk / 2);
        int const scale_tiles = static_cast<int>(padded_blocks(k) / 4);
        scale_ =
            scales + (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 + own(lane % 8) * 16;
    }

    __device__ __forceinline__ bool done() const { return chunk_ >= end_; }

    __device__ __forceinline__ void advance() {
        code_ += kChunk / 2;
        scale_ += 4 * 512;
        ++chunk_;
    }

    // The chunk to a stage, of the warp whose rows begin `down` further down. Copy i of a lane: the warp's row
    // lane / 8 + 4 * (i % 2) in quarter i / 2, its 16-byte column lane % 8. Neighbouring rows swap columns, so that
    // load_group reads without bank conflicts.
    __device__ __forceinline__ void copy(uint32_t stage, int down = 0) const {
        int const lane = threadIdx.x % 32;
        uint32_t const row = stage + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 * 2)) * 16;
        uint32_t const scale = stage + kCodeBytes + lane * 16;
        int const pitch = k_ / 2;
        if (whole_) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                ptx::cp_async_16(row + i * 4 * (kChunk / 2), code_ + static_cast<int64_t>(pitch) * (down + offset(i)));
            }
            ptx::cp_async_16(scale, scale_ + down * 16);
        } else {
            // Zeros where rows or K end.
            bool const inside = chunk_ * kChunk + lane % 8 * 32 < k_;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                bool const valid = inside && down + offset(i) < rows_left_;
                ptx::cp_async_16(row + i * 4 * (kChunk / 2),
                                 valid ? code_ + static_cast<int64_t>(pitch) * (down + offset(i)) : code_, valid);
            }
            ptx::cp_async_16(scale, scale_ + down * 16, (chunk_ * 4 + lane / 8) * 64 < k_ && rows_left_ != kNoGroup);
        }
    }

 private:
    static constexpr int kNoGroup = -128;  // rows_left_ of a group that exists is never so small

    // Of copy i's row from the lane's first.
    __device__ __forceinline__ int offset(int i) const { return i / 2 * 32 + i % 2 * stride_; }

    int chunk_, end_, k_, stride_, rows_left_;
    bool whole_;
    uint8_t const* code_;
    uint8_t const* scale_;
};

// What a lane multiplies of a group: 16 values of 4 rows, one of each quarter.
struct Codes {
    uint2 words[4];
    uint32_t scales[4];
};

__device__ __forceinline__ Codes load_group(uint8_t const* stage, int group) {
    int const g = threadIdx.x % 32 / 4;
    int const t = threadIdx.x % 4;
    Codes codes;
    uint4 const scales = *reinterpret_cast<uint4 const*>(stage + kCodeBytes + (group * 8 + g) * 16);
    codes.scales[0] = scales.x;
    codes.scales[1] = scales.y;
    codes.scales[2] = scales.z;
    codes.scales[3] = scales.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int const column = (group * 2 + t / 2) ^ (g % 4 * 2);
        codes.words[i] = *reinterpret_cast<uint2 const*>(stage + (i * 8 + g) * (kChunk / 2) + column * 16 + t % 2 * 8);
    }
    return codes;
}

// A word of a lane's four rows, as T: a[row][pair]. Scales 0 and 1 are the halves of `scales[0]`, 2 and 3 of [1].
template <typename T>
__device__ __forceinline__ void decode_word(Codes const& codes, int word, uint32_t const (&scales)[2], uint32_t one,
                                            uint32_t (&a)[4][4]) {
#pragma unroll
    for (int row = 0; row < 4; ++row) {
        w4a16::Decoder<T>::codes(word == 0 ? codes.words[row].x : codes.words[row].y, one, a[row]);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            a[row][pair] = row % 2 == 0 ? w4a16::multiply_by_half<T, 0>(a[row][pair], scales[row / 2])
                                        : w4a16::multiply_by_half<T, 1>(a[row][pair], scales[row / 2]);
        }
    }
}

// `own_byte` selects scale t of two rows' four.
template <typename T>
__device__ __forceinline__ void decode_scales(Codes const& codes, uint32_t own_byte, uint32_t one,
                                              uint32_t (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        scales[i] =
            w4a16::Decoder<T>::scales(__byte_perm(codes.scales[2 * i], codes.scales[2 * i + 1], own_byte), one);
    }
}

__device__ __forceinline__ uint32_t own_scale_byte() { return threadIdx.x % 4 * 0x11u + 0x40u; }

// acc += a warpgroup's rows times a group of K, whose units of activations `b` describes. Calls after_word(i) once the
// products before word i's have ended.
template <typename T, int kTokens, typename F>
__device__ __forceinline__ void multiply_group(Codes const& codes, uint32_t own_byte, uint32_t one, uint64_t b,
                                               float (&acc)[2][kTokens / 2], F&& after_word) {
    uint32_t scales[2];
    decode_scales<T>(codes, own_byte, one, scales);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        uint32_t a[4][4];
        decode_word<T>(codes, word, scales, one, a);
        ptx::wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint64_t const descriptor = ptx::advance(b, (word * 4 + half * 2) * kTokens * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ptx::wgmma<T>(acc[i], a[2 * i][2 * half], a[2 * i + 1][2 * half], a[2 * i][2 * half + 1],
                              a[2 * i + 1][2 * half + 1], descriptor);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        after_word(word);
    }
}

// The same by mma.sync, each warp for itself, of units at shared address `units`: up to 16 tokens it takes fewer clocks
// than wgmma, whose shortest product is as long as one of 24 columns.
template <typename T, int kTokens>
__device__ __forceinline__ void multiply_group_sync(Codes const& codes, uint32_t own_byte, uint32_t one, uint32_t units,
                                                    float (&acc)[2][kTokens / 2]) {
    int const lane = threadIdx.x % 32;
    uint32_t scales[2];
    decode_scales<T>(codes, own_byte, one, scales);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        uint32_t b[kTokens / 8][4];
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
            ptx::ldmatrix(b[n], units + ((word * 4 + lane / 8) * kTokens + n * 8 + lane % 8) * 16);
        }
        uint32_t a[4][4];
        decode_word<T>(codes, word, scales, one, a);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto& d = *reinterpret_cast<float(*)[4]>(&acc[i][4 * n]);
                    ptx::mma_m16n8k16<T>(d, a[2 * i][2 * half], a[2 * i + 1][2 * half], a[2 * i][2 * half + 1],
                                         a[2 * i + 1][2 * half + 1], b[n][2 * half], b[n][2 * half + 1]);
                }
            }
        }
    }
}

}  // namespace trt_nvfp4::sm90
