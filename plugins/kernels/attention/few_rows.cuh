// As fragments.cuh, for up to 8 queries: keys, and the head's dimensions of values, are the rows of mma.sync's 16 x 8
// results, queries its columns. Of 16 rows of queries half would be multiplied, and kept in registers, for nothing.
//
// Lane 4g + t has of queries 2t and 2t + 1: scores[m][i] of key 16m + g + 8 (i / 2), query 2t + i % 2.
#pragma once

#include "attention/fragments.cuh"

namespace trt_nvfp4::attention {

constexpr int kFewRows = 8;

// scores += K Q^T of kKeys keys. `query(step, b)` gives the operand of 16 dimensions.
template <typename T, bool kFp8, int kHeadDim, int kKeys, typename Query>
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 16][4], uint32_t keys, Query query) {
    constexpr int kPitch = Tile<kFp8, kHeadDim, kKeys>::kPitch;
    using Op = Operand<T, kFp8>;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t b[2];
        query(step, b);
        if constexpr (kFp8) {
#pragma unroll
            for (int block = 0; block < kKeys / 32; ++block) {
                uint32_t codes[4], first[4], second[4];
                ptx::ldmatrix(codes, column_address(keys + block * 32 * kPitch + step * 16, kPitch));
#pragma unroll
                for (int j = 0; j < 4; ++j) e4m3_key_pairs(codes[j], first[j], second[j]);
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    ptx::mma_m16n8k16<Op>(scores[2 * block + j / 2], first[j], first[j + 1], second[j], second[j + 1],
                                          b[0], b[1]);
                }
            }
        } else {
#pragma unroll
            for (int block = 0; block < kKeys / 16; ++block) {
                uint32_t a[4];
                ptx::ldmatrix(a, square_address<true>(keys + block * 16 * kPitch + step * 32, kPitch));
                ptx::mma_m16n8k16<Op>(scores[block], a[0], a[1], a[2], a[3], b[0], b[1]);
            }
        }
    }
}

// The operand of 16 dimensions of queries at `queries`, rows `pitch` bytes apart.
__device__ __forceinline__ void load_few_queries(uint32_t (&b)[2], uint32_t queries, int pitch, int step) {
    uint32_t const place = queries + threadIdx.x % 32 / 4 * pitch + step * 32 + threadIdx.x % 4 * 4;
    b[0] = ptx::load_shared_word(place);
    b[1] = ptx::load_shared_word(place + 16);
}

// Keys 2t and 2t + 1 of query g, of a lane that gives queries 2t and 2t + 1 of key g.
__device__ __forceinline__ uint32_t turned(uint32_t pair) {
    int const lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8;
    uint32_t const even = __shfl_sync(0xffffffffu, pair, from), odd = __shfl_sync(0xffffffffu, pair, from + 4);
    return __byte_perm(even, odd, lane / 4 % 2 != 0 ? 0x7632 : 0x5410);
}

// sums += V^T P^T: sums[p][i] of dimension few_rows_dimension(p, i / 2), query 2t + i % 2.
template <typename T, bool kFp8, int kHeadDim, int kKeys>
__device__ __forceinline__ void multiply_values(float (&sums)[kHeadDim / 16][4],
                                                float const (&probabilities)[kKeys / 16][4], uint32_t values) {
    constexpr int kPitch = Tile<kFp8, kHeadDim, kKeys>::kPitch;
    using Op = Operand<T, kFp8>;
    uint32_t p[kKeys / 16][2];
#pragma unroll
    for (int m = 0; m < kKeys / 16; ++m) {
        for (int i = 0; i < 2; ++i) {
            p[m][i] = turned(pack<Op>(probabilities[m][2 * i], probabilities[m][2 * i + 1]));
        }
    }
#pragma unroll
    for (int part = 0; part < kHeadDim / 16; ++part) {
        if constexpr (kFp8) {
#pragma unroll
            for (int block = 0; block < kKeys / 32; ++block) {
                uint32_t codes[4], even[4], odd[4];
                ptx::ldmatrix_transposed(codes, column_address(values + block * 32 * kPitch + part * 16, kPitch));
#pragma unroll
                for (int j = 0; j < 4; ++j) e4m3_pairs(codes[j], even[j], odd[j]);
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    uint32_t const(&b)[2] = p[2 * block + j / 2];
                    ptx::mma_m16n8k16<Op>(sums[part], even[j], odd[j], even[j + 1], odd[j + 1], b[0], b[1]);
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) {
                uint32_t a[4];
                ptx::ldmatrix_transposed(a, square_address<false>(values + step * 16 * kPitch + part * 32, kPitch));
                ptx::mma_m16n8k16<Op>(sums[part], a[0], a[1], a[2], a[3], p[step][0], p[step][1]);
            }
        }
    }
}

template <bool kFp8>
__device__ __forceinline__ int few_rows_dimension(int part, int second) {
    int const g = threadIdx.x % 32 / 4;
    return part * 16 + (kFp8 ? 2 * g + second : g + 8 * second);
}

// The maximum, or sum, over the eight lanes that share queries.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, bit));
    return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// Queries 2t and 2t + 1.
struct FewRowsSoftmax {
    float largest[2] = {-INFINITY, -INFINITY};
    float weight[2] = {};

    // As Softmax::update; `seen(key, i)` of query 2t + i and key `key` + g.
    template <int kTiles, int kSums, typename Seen>
    __device__ __forceinline__ void update(float (&scores)[kTiles][4], float (&sums)[kSums][4], ScoreScale const& scale,
                                           bool all, Seen seen) {
        if (scale.cap > 0.0f) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[m][i] = scale.capped(scores[m][i]);
            }
        }
        if (!all) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!seen(16 * m + i / 2 * 8, i % 2)) scores[m][i] = -INFINITY;
                }
            }
        }
        float shrink[2];
#pragma unroll
        for (int query = 0; query < 2; ++query) {
            float top = largest[query];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) top = fmaxf(top, fmaxf(scores[m][query], scores[m][query + 2]));
            top = column_max(top);
            // No key so far: any finite number gives exponentials of 0.
            float const base = top == -INFINITY ? 0.0f : top * scale.scale;
            shrink[query] = ptx::exp2(fmaf(largest[query], scale.scale, -base));
            largest[query] = top;
            weight[query] *= shrink[query];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int i = query; i < 4; i += 2) {
                    scores[m][i] = ptx::exp2(fmaf(scores[m][i], scale.scale, -base));
                    weight[query] += scores[m][i];
                }
            }
        }
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < kSums; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[n][i] *= shrink[i % 2];
            }
        }
    }

    // As an exponent of 2.
    __device__ float top(int query, ScoreScale const& scale) const {
        return largest[query] == -INFINITY ? -INFINITY : largest[query] * scale.scale;
    }
};

}  // namespace trt_nvfp4::attention
