// A warp's 32 rows of weights, decoded in registers (operand A), times activations (operand B, sm90_w4a16_image.cuh).
#pragma once

#include <algorithm>

#include "ptx/mma_sync.cuh"
#include "ptx/wgmma.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm90_w4a16_image.cuh"

namespace trt_nvfp4::sm90 {

// What a lane multiplies of a group: 16 values of 4 rows, one of each quarter.
struct Codes {
    uint2 words[4];
    uint32_t scales[4];
};

// Zero, but only known once `read` is, of `one`, which is 1. An address that it is added to holds an arrival back:
// without that arrivals overtake reads under way, and so may what is written next to where these read.
__device__ __forceinline__ uint32_t zero_behind(uint32_t read, uint32_t one) { return read & (one - 1); }
__device__ __forceinline__ uint32_t zero_behind(Codes const& codes, uint32_t one) {
    return zero_behind(codes.scales[0] ^ codes.words[0].x ^ codes.words[1].x ^ codes.words[2].x ^ codes.words[3].x,
                       one);
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
        scales[i] = w4a16::Decoder<T>::scales(__byte_perm(codes.scales[2 * i], codes.scales[2 * i + 1], own_byte), one);
    }
}

__device__ __forceinline__ uint32_t own_scale_byte() { return threadIdx.x % 4 * 0x11u + 0x40u; }

// The first sums of `acc` += a warpgroup's rows times a group of K, whose units of kTokens tokens, in panels of the
// kind Panel, `b` describes. Calls after_word(i) once the products before word i's have ended.
template <typename T, class Panel, int kTokens, int kSums, typename F>
__device__ __forceinline__ void multiply_group(Codes const& codes, uint32_t own_byte, uint32_t one, uint64_t b,
                                               float (&acc)[2][kSums], F&& after_word) {
    uint32_t scales[2];
    decode_scales<T>(codes, own_byte, one, scales);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        uint32_t a[4][4];
        decode_word<T>(codes, word, scales, one, a);
        ptx::wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint64_t const descriptor = ptx::advance(b, (word * 4 + half * 2) * Panel::kUnitBytes);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                auto& d = *reinterpret_cast<float (*)[kTokens / 2]>(&acc[i]);
                ptx::wgmma<T>(d, a[2 * i][2 * half], a[2 * i + 1][2 * half], a[2 * i][2 * half + 1],
                              a[2 * i + 1][2 * half + 1], descriptor);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        after_word(word);
    }
}

// Tokens of the accumulators that products of kTokens are summed in.
template <int kTokens>
constexpr int kSumTokens = std::max(kTokens, 8);

// Whether so many tokens are multiplied by mma.sync, or one in FP16 lanes, each warp for itself: up to 8 that takes
// fewer clocks than wgmma, whose shortest product is as long as one of 24 columns, and at 16 hardly more.
template <int kTokens>
constexpr bool kBySync = kTokens <= 8;

// Where what a lane reads of a panel of this kind begins.
template <class Panel>
__device__ __forceinline__ uint32_t lane_units() {
    int const lane = threadIdx.x % 32;
    if constexpr (Panel::kTokens == 1) {
        return lane % 4 * Panel::kLaneBytes;
    } else {
        return lane / 8 * Panel::kUnitBytes + lane % 8 * Panel::kTokenBytes;
    }
}

// The same by mma.sync, each warp for itself, of eights of tokens whose first units, of this lane (lane_units), are
// `offset` behind shared addresses `units` in panels of the kind Panel. Returns what is known once all of the units
// have been read.
template <typename T, class Panel, int kColumns, int kSums>
__device__ __forceinline__ uint32_t multiply_group_sync(Codes const& codes, uint32_t own_byte, uint32_t one,
                                                        uint32_t const (&units)[kColumns], int offset,
                                                        float (&acc)[2][kSums]) {
    uint32_t read = 0;
    uint32_t scales[2];
    decode_scales<T>(codes, own_byte, one, scales);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        uint32_t b[kColumns][4];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            ptx::ldmatrix(b[n], units[n] + offset + word * 4 * Panel::kUnitBytes);
            read ^= b[n][0];
        }
        uint32_t a[4][4];
        decode_word<T>(codes, word, scales, one, a);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto& d = *reinterpret_cast<float (*)[4]>(&acc[i][4 * n]);
                    ptx::mma_m16n8k16<T>(d, a[2 * i][2 * half], a[2 * i + 1][2 * half], a[2 * i][2 * half + 1],
                                         a[2 * i + 1][2 * half + 1], b[n][2 * half], b[n][2 * half + 1]);
                }
            }
        }
    }
    return read;
}

// The same of one token, in FP16 lanes, without tensor cores, which lower the GPU's clock: sums[q] += this lane's block
// of its row of quarter q times the activations at shared address `units` in a panel of the kind Panel. Sums may hold
// those of four groups.
template <class Panel>
__device__ __forceinline__ uint32_t multiply_group_token(Codes const& codes, uint32_t own_byte, uint32_t one,
                                                         uint32_t units, uint32_t (&sums)[4]) {
    uint4 x[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) x[word] = Panel::load(units, word);
#pragma unroll
    for (int row = 0; row < 4; ++row) {
        uint32_t const two = __byte_perm(codes.scales[row / 2 * 2], codes.scales[row / 2 * 2 + 1], own_byte);
        uint32_t const scales = w4a16::Decoder<__half>::sum_scales(two, one);
        uint2 const words = codes.words[row];
        uint32_t const sum = w4a16::add_products(words.y, one, x[1], w4a16::add_products(words.x, one, x[0], 0u));
        sums[row] = row % 2 == 0 ? w4a16::multiply_add_by_half<0>(sum, scales, sums[row])
                                 : w4a16::multiply_add_by_half<1>(sum, scales, sums[row]);
    }
    return x[0].x ^ x[0].w ^ x[1].x ^ x[1].w;
}

}  // namespace trt_nvfp4::sm90
