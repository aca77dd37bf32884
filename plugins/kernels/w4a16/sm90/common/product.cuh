// A warp's 32 rows of weights, decoded in registers (operand A), times activations (operand B,
// sm90/common/staged_tile.cuh).
#pragma once

#include <algorithm>

#include "ptx/mma_sync.cuh"
#include "ptx/permute.cuh"
#include "ptx/wgmma.cuh"
#include "w4a16/sm90/common/staged_tile.cuh"
#include "w4a16/stream/sm80_w4a16_decode.cuh"

namespace trt_nvfp4::sm90 {

// What a lane multiplies of a group: 16 values of 4 rows, one of each quarter.
struct Codes {
    uint2 words[4];
    uint32_t scales[4];
};

// Zero, but only known once `read` is, of `one`, which is 1. An address that it is added to holds an arrival back:
// without that arrivals overtake reads in flight, and so may what is written next to where these read.
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

// The first sums of `acc` += a warpgroup's rows times a group of K, whose units of kTokens tokens, in staged tiles of
// the kind Panel, `b` describes. kWords' products are waited for together. Calls after_word(i) once the products before
// word i's have ended.
template <typename T, class StagedTile, int kTokens, int kWords, int kSums, typename F>
__device__ __forceinline__ void multiply_group(Codes const& codes, uint32_t own_byte, uint32_t one, uint64_t b,
                                               float (&acc)[2][kSums], F&& after_word) {
    uint32_t scales[2];
    decode_scales<T>(codes, own_byte, one, scales);
#pragma unroll
    for (int first = 0; first < 2; first += kWords) {
        uint32_t a[kWords][4][4];
#pragma unroll
        for (int i = 0; i < kWords; ++i) decode_word<T>(codes, first + i, scales, one, a[i]);
        ptx::wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2 * kWords; ++half) {
            uint64_t const descriptor = ptx::advance(b, (first * 4 + half * 2) * StagedTile::kUnitBytes);
            auto const& word = a[half / 2];
            int const pair = half % 2 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                auto& d = *reinterpret_cast<float (*)[kTokens / 2]>(&acc[i]);
                ptx::wgmma<T>(d, word[2 * i][pair], word[2 * i + 1][pair], word[2 * i][pair + 1],
                              word[2 * i + 1][pair + 1], descriptor);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        after_word(first);
    }
}

// Tokens of the accumulators that products of kTokens are summed in.
template <int kTokens>
constexpr int kSumTokens = std::max(kTokens, 8);

// Whether so many tokens are multiplied by mma.sync, or one as integers, each warp for itself: up to 8 that takes
// fewer clocks than wgmma, whose shortest product is as long as one of 24 columns, and at 16 hardly more.
template <int kTokens>
constexpr bool kBySync = kTokens <= 8;

// Where what a lane reads of a staged tile of this kind begins.
template <class StagedTile>
__device__ __forceinline__ uint32_t lane_units() {
    int const lane = threadIdx.x % 32;
    if constexpr (StagedTile::kTokens == 1) {
        return lane % 4 * StagedTile::kLaneBytes;
    } else {
        return lane / 8 * StagedTile::kUnitBytes + lane % 8 * StagedTile::kTokenBytes;
    }
}

// The same by mma.sync, each warp for itself, of eights of tokens whose first units, of this lane (lane_units), are
// `offset` behind shared addresses `units` in staged tiles of the kind Panel. Returns what is known once all of the
// units have been read.
template <typename T, class StagedTile, int kColumns, int kSums>
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
            ptx::ldmatrix(b[n], units[n] + offset + word * 4 * StagedTile::kUnitBytes);
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

// 12 more than twice what eight codes stand for, a byte each. By the multiplier as far as may be (shift_left).
__device__ __forceinline__ void lift(uint32_t codes, uint32_t one, uint32_t (&bytes)[2]) {
    constexpr uint32_t kLifted[2][2] = {{0x0f0e0d0cu, 0x18141210u},
                                        {0x090a0b0cu, 0x00040608u}};  // [sign], by magnitude
    uint32_t const flipped = codes ^ 0x88888888u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // A set sign is a selector's bit 3, by which not the byte is picked but its sign: zero.
        bytes[i] = ptx::permute_bytes(kLifted[0][0], kLifted[0][1], codes >> 16 * i) * one +
                   ptx::permute_bytes(kLifted[1][0], kLifted[1][1], flipped >> 16 * i);
    }
}

// sum + such bytes times as many 16-bit integers.
__device__ __forceinline__ int add_products(uint32_t const (&bytes)[2], uint4 x, int sum) {
    sum = __dp2a_lo(static_cast<int>(x.x), static_cast<int>(bytes[0]), sum);
    sum = __dp2a_hi(static_cast<int>(x.y), static_cast<int>(bytes[0]), sum);
    sum = __dp2a_lo(static_cast<int>(x.z), static_cast<int>(bytes[1]), sum);
    return __dp2a_hi(static_cast<int>(x.w), static_cast<int>(bytes[1]), sum);
}

// The same of one token, as integers (fixed_point.cuh), which are exact and take no tensor cores: these lower the GPU's
// clock. sums[q] += this lane's block of its row of quarter q times the activations at shared address `units` in a
// staged tile of the kind Panel, twice.
template <class StagedTile>
__device__ __forceinline__ uint32_t multiply_group_token(Codes const& codes, uint32_t own_byte, uint32_t one,
                                                         uint32_t units, float (&sums)[4]) {
    uint4 x[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) x[word] = StagedTile::load(units, word);
    constexpr uint32_t kMinusTwelve[2] = {0xf4f4f4f4u, 0xf4f4f4f4u};
    int const lowered = add_products(kMinusTwelve, x[1], add_products(kMinusTwelve, x[0], 0));
#pragma unroll
    for (int row = 0; row < 4; ++row) {
        uint32_t const two = __byte_perm(codes.scales[row / 2 * 2], codes.scales[row / 2 * 2 + 1], own_byte);
        uint32_t const pair = w4a16::Decoder<__half>::unpack(two);
        float2 const scales = __half22float2(*reinterpret_cast<__half2 const*>(&pair));
        uint32_t words[2][2];
        lift(codes.words[row].x, one, words[0]);
        lift(codes.words[row].y, one, words[1]);
        int const sum = add_products(words[1], x[1], 0) + add_products(words[0], x[0], lowered);
        sums[row] = fmaf(static_cast<float>(sum), row % 2 == 0 ? scales.x : scales.y, sums[row]);
    }
    return x[0].x ^ x[0].w ^ x[1].x ^ x[1].w;
}

}  // namespace trt_nvfp4::sm90
