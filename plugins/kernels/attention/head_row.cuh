// Queries, keys and values of new tokens: norm, rotation and where they go. One warp per head of a token, in float32;
// the result is rounded once, to T or to E4M3.
#pragma once

#include "attention/args.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4::attention {

// What the call has of a head of a token. `head` counts queries, then keys, then values.
template <typename T>
__device__ __forceinline__ T const* given_row(Args<T> const& args, int batch, int token, int head) {
    int const all = args.heads + 2 * args.kv_heads;
    return args.qkv + ((int64_t{batch} * args.tokens + token) * all + head) * args.head_dim;
}

// 1 / rms of a row whose elements a warp's lanes share.
template <int kLaneDims, typename T>
__device__ __forceinline__ float inverse_rms_of(float const (&row)[kLaneDims], Args<T> const& args) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) squares += row[j] * row[j];
    float const mean = ptx::warp_sum(squares) / static_cast<float>(args.head_dim);
    return __frcp_rn(__fsqrt_rn(mean + args.epsilon));
}

// Elements lane, lane + 32, ... of head_row's usual case, in a quarter of its instructions, which follow one another:
// halves of whole heads are rotated, so that a lane has both elements of every pair.
template <int kLaneDims, typename T>
__device__ __forceinline__ void rotate_halves(float (&row)[kLaneDims], Args<T> const& args, T const* x, T const* norm,
                                              int64_t table) {
    constexpr int kPairs = kLaneDims / 2;
    int const lane = threadIdx.x % 32;
    float cosine[kPairs], sine[kPairs], weight[kLaneDims];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        cosine[j] = args.cosines[table + lane + 32 * j];
        sine[j] = args.sines[table + lane + 32 * j];
    }
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
        row[j] = ptx::to_float(x[lane + 32 * j]);
        weight[j] = norm == nullptr ? 1.0f : ptx::to_float(norm[lane + 32 * j]);
    }
    float inverse_rms = 1.0f;
    if (norm != nullptr) inverse_rms = inverse_rms_of(row, args);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        float const first = row[j] * inverse_rms * weight[j];
        float const second = row[j + kPairs] * inverse_rms * weight[j + kPairs];
        row[j] = first * cosine[j] + second * -sine[j];
        row[j + kPairs] = second * cosine[j] + first * sine[j];
    }
}

// Elements lane, lane + 32, ... of a head that is given as x [head_dim], up to kLaneDims of them. All loads
// are issued together. All lanes of a warp call this.
template <int kLaneDims, typename T>
__device__ __forceinline__ void head_row(float (&row)[kLaneDims], Args<T> const& args, T const* x, int head,
                                         int position) {
    int const lane = threadIdx.x % 32;
    bool const is_value = head >= args.heads + args.kv_heads;
    T const* const norm = is_value ? nullptr : head < args.heads ? args.query_norm : args.key_norm;
    int const rotary = is_value ? 0 : args.rotary, half = rotary / 2;
    int64_t const table = int64_t{min(position, args.positions - 1)} * half;
    if (norm == nullptr && rotary == 0) {
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
            row[j] = lane + 32 * j < args.head_dim ? ptx::to_float(x[lane + 32 * j]) : 0.0f;
        }
        return;
    }
    if (kLaneDims % 2 == 0 && rotary == 32 * kLaneDims && !args.interleaved) {
        rotate_halves(row, args, x, norm, table);
        return;
    }

    float other[kLaneDims], cosine[kLaneDims], sine[kLaneDims], weight[kLaneDims], other_weight[kLaneDims];
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
        int const i = lane + 32 * j;
        bool const inside = i < args.head_dim, rotated = i < rotary;
        int const pair = args.interleaved ? i / 2 : i < half ? i : i - half;
        bool const second = args.interleaved ? i % 2 != 0 : i >= half;
        int const distance = args.interleaved ? 1 : half;
        int const partner = second ? i - distance : i + distance;
        row[j] = inside ? ptx::to_float(x[i]) : 0.0f;
        other[j] = rotated ? ptx::to_float(x[partner]) : 0.0f;
        weight[j] = inside && norm != nullptr ? ptx::to_float(norm[i]) : 1.0f;
        other_weight[j] = rotated && norm != nullptr ? ptx::to_float(norm[partner]) : 1.0f;
        cosine[j] = rotated ? args.cosines[table + pair] : 1.0f;
        sine[j] = rotated ? args.sines[table + pair] : 0.0f;
        if (!second) sine[j] = -sine[j];
    }
    float inverse_rms = 1.0f;
    if (norm != nullptr) inverse_rms = inverse_rms_of(row, args);
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
        float const own = row[j] * inverse_rms * weight[j], partner = other[j] * inverse_rms * other_weight[j];
        row[j] = own * cosine[j] + partner * sine[j];
    }
}

// The warp writes elements of one new key (kv_index < kv_heads) or value (from kv_heads on), as head_row has them, into
// its cache.
template <int kLaneDims, bool kFp8, typename T>
__device__ __forceinline__ void store_row(Args<T> const& args, float const (&row)[kLaneDims], int batch, int kv_index,
                                          int position) {
    bool const is_value = kv_index >= args.kv_heads;
    int const kv_head = is_value ? kv_index - args.kv_heads : kv_index;
    int64_t const offset = cache_row(args, batch, kv_head, position) * args.head_dim;
    void* const cache = is_value ? args.values : args.keys;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
        int const i = threadIdx.x % 32 + 32 * j;
        if (i >= args.head_dim) continue;
        if constexpr (kFp8) {
            float const scale = (is_value ? args.value_scale : args.key_scale)[kv_head];
            static_cast<uint8_t*>(cache)[offset + i] = ptx::e4m3_encode(__fdiv_rn(row[j], scale));
        } else {
            static_cast<T*>(cache)[offset + i] = ptx::from_float<T>(row[j]);
        }
    }
}

// The same of one that is given as x.
template <int kLaneDims, bool kFp8, typename T>
__device__ __forceinline__ void append_row(Args<T> const& args, T const* x, int batch, int kv_index, int position) {
    float row[kLaneDims];
    head_row(row, args, x, args.heads + kv_index, position);
    store_row<kLaneDims, kFp8>(args, row, batch, kv_index, position);
}

}  // namespace trt_nvfp4::attention
