// Tiles of cached keys and values in shared memory as operands of mma.sync: S = Q K^T and O += P V, Q and P by rows of
// 16. Rows of a tile lie at an odd number of 16-byte units from each other, so that ldmatrix meets no bank twice.
//
// E4M3 caches become float16 in registers: by an instruction for two neighbours where there is one, elsewhere by shifts
// and masks, since the bits of E4M3 in float16's fields are 2^-8 times the value, exactly, and the factor goes into
// scales. A register of ldmatrix holds four neighbours. For values, 0 and 2 go to one operand register, 1 and 3 to the
// other, which permutes the output's columns; for keys, the cheapest order, a permutation of the head's dimensions that
// queries are stored in too.
#pragma once

#include <type_traits>

#include "attention/args.cuh"
#include "ptx/approximate.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/element.cuh"
#include "ptx/mma_sync.cuh"

namespace trt_nvfp4::attention {

template <typename T, bool kFp8>
struct OperandOf {
    using Type = T;
};
template <typename T>
struct OperandOf<T, true> {
    using Type = __half;
};
// What the tensor cores multiply: T, or of E4M3 caches float16.
template <typename T, bool kFp8>
using Operand = typename OperandOf<T, kFp8>::Type;

constexpr float kLog2E = 1.44269504088896341f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif
constexpr float kE4m3InHalf = kConvertsE4m3 ? 1.0f : 256.0f;  // a value over what it becomes

// Sizes of a tile of kKeys cached rows of up to kHeadDim elements.
template <bool kFp8, int kHeadDim, int kKeys>
struct Tile {
    static constexpr int kUnits = kHeadDim * (kFp8 ? 1 : 2) / 16;
    static constexpr int kPitch = 16 * (kUnits | 1);
    static constexpr int kBytes = kKeys * kPitch;
};
template <int kHeadDim>
constexpr int kQueryPitch = 2 * kHeadDim + 16;

// Where element i of a query is stored: next to each other what one operand register holds.
template <bool kFp8>
__device__ __forceinline__ int query_place(int i) {
    if constexpr (!kFp8) return i;
    constexpr uint32_t kPlaces = kConvertsE4m3 ? 0x9810 : 0x9180;  // of elements 4t .. 4t + 3, but for 2t
    return i / 16 * 16 + (kPlaces >> (4 * (i % 4)) & 15) + i % 16 / 4 * 2;
}

// The warp stores a query of head_row's, and zeros up to 32 kLaneDims where `padded`.
template <typename T, bool kFp8, bool kPadded, int kLaneDims>
__device__ __forceinline__ void store_query(float const (&row)[kLaneDims], int head_dim, Operand<T, kFp8>* out) {
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
        int const i = threadIdx.x % 32 + 32 * j;
        float x = ptx::to_float(ptx::from_float<T>(row[j]));
        if constexpr (kFp8) x = fminf(fmaxf(x, -65504.0f), 65504.0f);
        if (kPadded || i < head_dim) out[query_place<kFp8>(i)] = ptx::from_float<Operand<T, kFp8>>(x);
    }
}

// Four E4M3 values as two pairs of float16, over kE4m3InHalf: 0 and 2, 1 and 3.
__device__ __forceinline__ void e4m3_pairs(uint32_t codes, uint32_t& even, uint32_t& odd) {
    if constexpr (kConvertsE4m3) {
        uint32_t const parted = __byte_perm(codes, 0, 0x3120);
        even = ptx::e4m3_to_half2<0>(parted);
        odd = ptx::e4m3_to_half2<1>(parted);
        return;
    }
    // The largest magnitude, 0x7f, is E4M3's NaN; one more bit of exponent makes it float16's.
    auto const spread = [](uint32_t high_bytes) {
        uint32_t const magnitudes = high_bytes >> 1 & 0x3f803f80u;
        return (high_bytes & 0x80008000u) | magnitudes | ((magnitudes + 0x00800080u) & 0x40004000u);
    };
    even = spread(codes << 8);
    odd = spread(codes);
}

// The same in the order of keys.
__device__ __forceinline__ void e4m3_key_pairs(uint32_t codes, uint32_t& first, uint32_t& second) {
    if constexpr (kConvertsE4m3) {
        first = ptx::e4m3_to_half2<0>(codes);
        second = ptx::e4m3_to_half2<1>(codes);
    } else {
        e4m3_pairs(codes, first, second);
    }
}

template <typename Op>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<Op, __half>) {
        __half2 const pair = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    } else {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    }
}

// kThreads threads copy `width` bytes of each of kKeys rows, which lie row_bytes apart from `rows` on; rows from
// `count` on and what a row lacks become zero: a value there is multiplied by probability 0, and no NaN may be.
template <bool kFp8, int kHeadDim, int kKeys, int kThreads, int kUnrolled = kHeadDim <= 128 ? 64 : 2>
__device__ __forceinline__ void copy_tile(uint32_t tile, uint8_t const* rows, int row_bytes, int width, int count,
                                          int thread) {
    using Sizes = Tile<kFp8, kHeadDim, kKeys>;
    static_assert(kKeys * Sizes::kUnits % kThreads == 0, "the same for every thread");
    constexpr int kSteps = kKeys * Sizes::kUnits / kThreads;
#pragma unroll(kUnrolled)  // long heads leave few registers
    for (int step = 0; step < kSteps; ++step) {
        int const i = thread + step * kThreads;
        int const row = i / Sizes::kUnits, unit = i % Sizes::kUnits;
        bool const inside = row < count && unit * 16 < width;
        uint8_t const* const source = inside ? rows + int64_t{row} * row_bytes + unit * 16 : rows;
        ptx::cp_async_16(tile + row * Sizes::kPitch + unit * 16, source, inside);
    }
}

// The address that a lane gives ldmatrix for 16 rows x 32 bytes of which matrices go down first (kDown) or right first.
template <bool kDown>
__device__ __forceinline__ uint32_t square_address(uint32_t base, int pitch) {
    int const matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
    int const down = kDown ? matrix % 2 : matrix / 2, right = kDown ? matrix / 2 : matrix % 2;
    return base + (down * 8 + row) * pitch + right * 16;
}
// And for 32 rows x 16 bytes.
__device__ __forceinline__ uint32_t column_address(uint32_t base, int pitch) { return base + threadIdx.x % 32 * pitch; }

// The A operand of 16 queries x 16 dimensions: a[0], a[2] are rows g, a[1], a[3] rows g + 8.
__device__ __forceinline__ void load_query(uint32_t (&a)[4], uint32_t queries, int pitch, int step) {
    ptx::ldmatrix(a, square_address<true>(queries + step * 32, pitch));
}

// scores[m][n] += Q[m] K^T: columns 8n .. 8n + 7 of kKeys keys, kMany times 16 rows. `query(m, step, a)` gives the
// operand of 16 dimensions.
template <typename T, bool kFp8, int kHeadDim, int kKeys, int kMany, typename Query>
__device__ __forceinline__ void multiply_keys(float (&scores)[kMany][kKeys / 8][4], uint32_t keys, Query query) {
    constexpr int kPitch = Tile<kFp8, kHeadDim, kKeys>::kPitch;
    using Op = Operand<T, kFp8>;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t a[kMany][4];
#pragma unroll
        for (int m = 0; m < kMany; ++m) query(m, step, a[m]);
        if constexpr (kFp8) {
#pragma unroll
            for (int block = 0; block < kKeys / 32; ++block) {
                uint32_t codes[4];
                ptx::ldmatrix(codes, column_address(keys + block * 32 * kPitch + step * 16, kPitch));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t b0, b1;
                    e4m3_key_pairs(codes[j], b0, b1);
#pragma unroll
                    for (int m = 0; m < kMany; ++m) {
                        ptx::mma_m16n8k16<Op>(scores[m][block * 4 + j], a[m][0], a[m][1], a[m][2], a[m][3], b0, b1);
                    }
                }
            }
        } else {
#pragma unroll
            for (int block = 0; block < kKeys / 16; ++block) {
                uint32_t b[4];
                ptx::ldmatrix(b, square_address<false>(keys + block * 16 * kPitch + step * 32, kPitch));
#pragma unroll
                for (int m = 0; m < kMany; ++m) {
                    ptx::mma_m16n8k16<Op>(scores[m][block * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    ptx::mma_m16n8k16<Op>(scores[m][block * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    }
}

// sums[m][n] += P[m] V. Column c of lane 4g + t in sums[.][n] is dimension output_column(n, 2t + c).
template <typename T, bool kFp8, int kHeadDim, int kKeys, int kMany>
__device__ __forceinline__ void multiply_values(float (&sums)[kMany][kHeadDim / 8][4],
                                                float const (&probabilities)[kMany][kKeys / 8][4], uint32_t values) {
    constexpr int kPitch = Tile<kFp8, kHeadDim, kKeys>::kPitch;
    using Op = Operand<T, kFp8>;
    uint32_t p[kMany][kKeys / 8][2];
#pragma unroll
    for (int m = 0; m < kMany; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            p[m][n][0] = pack<Op>(probabilities[m][n][0], probabilities[m][n][1]);
            p[m][n][1] = pack<Op>(probabilities[m][n][2], probabilities[m][n][3]);
        }
    }
    auto const multiply = [&](int m, int column, int step, uint32_t b0, uint32_t b1) {
        ptx::mma_m16n8k16<Op>(sums[m][column], p[m][2 * step][0], p[m][2 * step][1], p[m][2 * step + 1][0],
                              p[m][2 * step + 1][1], b0, b1);
    };
#pragma unroll
    for (int pair = 0; pair < kHeadDim / 16; ++pair) {
        if constexpr (kFp8) {
#pragma unroll
            for (int block = 0; block < kKeys / 32; ++block) {
                uint32_t codes[4], even[4], odd[4];
                ptx::ldmatrix_transposed(codes, column_address(values + block * 32 * kPitch + pair * 16, kPitch));
#pragma unroll
                for (int j = 0; j < 4; ++j) e4m3_pairs(codes[j], even[j], odd[j]);
#pragma unroll
                for (int m = 0; m < kMany; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        multiply(m, 2 * pair, block * 2 + half, even[2 * half], even[2 * half + 1]);
                        multiply(m, 2 * pair + 1, block * 2 + half, odd[2 * half], odd[2 * half + 1]);
                    }
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) {
                uint32_t b[4];
                ptx::ldmatrix_transposed(b, square_address<true>(values + step * 16 * kPitch + pair * 32, kPitch));
#pragma unroll
                for (int m = 0; m < kMany; ++m) {
                    multiply(m, 2 * pair, step, b[0], b[1]);
                    multiply(m, 2 * pair + 1, step, b[2], b[3]);
                }
            }
        }
    }
}

template <bool kFp8>
__device__ __forceinline__ int output_column(int n, int column) {
    return kFp8 ? n / 2 * 16 + 2 * column + n % 2 : n * 8 + column;
}

// The maximum, or sum, over the four lanes that share rows.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What turns products into exponents of 2.
struct ScoreScale {
    float scale;  // of products, or with a soft cap of what that leaves: 1
    float inner;  // of products under the cap
    float cap;    // 0: none

    template <typename T>
    __device__ ScoreScale(Args<T> const& args, int kv_head, bool fp8)
        : scale(args.scale * kLog2E * (fp8 ? args.key_scale[kv_head] * kE4m3InHalf : 1.0f)),
          inner(0.0f),
          cap(args.softcap * kLog2E) {
        if (cap > 0.0f) {
            inner = 2.0f * scale / args.softcap;
            scale = 1.0f;
        }
    }

    // cap tanh(y / 2) for e^y = 2^inner product.
    __device__ float capped(float product) const {
        return cap - 2.0f * cap * ptx::reciprocal(ptx::exp2(product * inner) + 1.0f);
    }
};

// 16 rows' running maximum, of scores before the scale, and sum of exponentials: index 0 is row g, 1 row g + 8. The
// sums are a lane's own.
struct Softmax {
    float largest[2] = {-INFINITY, -INFINITY};
    float weight[2] = {};

    // Turns a row's scores into probabilities and scales down what was summed before. `seen(column, half)` says
    // whether row g + 8 half attends to key 8n + column; where `all` they do.
    template <int kColumns, int kSums, typename Seen>
    __device__ __forceinline__ void update(float (&scores)[kColumns][4], float (&sums)[kSums][4],
                                           ScoreScale const& scale, bool all, Seen seen) {
        float shrink[2];
        weigh(scores, scale, all, shrink, seen);
        scale_down(sums, shrink);
    }

    // The first half of that: what was summed before has to be scaled by `shrink`.
    template <int kColumns, typename Seen>
    __device__ __forceinline__ void weigh(float (&scores)[kColumns][4], ScoreScale const& scale, bool all,
                                          float (&shrink)[2], Seen seen) {
        if (scale.cap > 0.0f) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[n][i] = scale.capped(scores[n][i]);
            }
        }
        if (!all) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!seen(8 * n + i % 2, i / 2)) scores[n][i] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = largest[half];
#pragma unroll
            for (int n = 0; n < kColumns; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            top = quad_max(top);
            // No key so far: any finite number gives exponentials of 0.
            float const base = top == -INFINITY ? 0.0f : top * scale.scale;
            shrink[half] = ptx::exp2(fmaf(largest[half], scale.scale, -base));
            largest[half] = top;
            weight[half] *= shrink[half];
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[n][2 * half + i];
                    score = ptx::exp2(fmaf(score, scale.scale, -base));
                    weight[half] += score;
                }
            }
        }
    }

    template <int kSums>
    static __device__ __forceinline__ void scale_down(float (&sums)[kSums][4], float const (&shrink)[2]) {
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < kSums; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[n][i] *= shrink[i / 2];
            }
        }
    }

    // As an exponent of 2.
    __device__ float top(int half, ScoreScale const& scale) const {
        return largest[half] == -INFINITY ? -INFINITY : largest[half] * scale.scale;
    }
};

}  // namespace trt_nvfp4::attention
