// Before attention over many rows: new keys and values go into the caches, and queries, rotated and in the order that
// the tensor cores' kernels read, into a buffer [batch, kv_heads, tokens * group, head_dim]. One warp per head of a
// token.
#pragma once

#include "attention/fragments.cuh"
#include "attention/head_row.cuh"
#include "attention/launch.h"
#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::attention {

constexpr int kPrepareThreads = 256;

// The heads that most models have: 128 dimensions, all or none of them rotated by halves. Four neighbours are a lane's,
// so that a row takes a quarter of the loads and stores.
constexpr int kWideDim = 128;

template <typename T>
__device__ __forceinline__ bool is_wide(Args<T> const& args) {
    return args.head_dim == kWideDim && !args.interleaved && (args.rotary == 0 || args.rotary == kWideDim);
}

template <typename T>
__device__ __forceinline__ void load_four(T const* from, float (&out)[4]) {
    uint2 const bits = *reinterpret_cast<uint2 const*>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = ptx::to_float(reinterpret_cast<T const*>(&bits)[j]);
}

template <typename T>
__device__ __forceinline__ void store_four(T* to, float const (&values)[4]) {
    uint2 bits;
#pragma unroll
    for (int j = 0; j < 4; ++j) reinterpret_cast<T*>(&bits)[j] = ptx::from_float<T>(values[j]);
    *reinterpret_cast<uint2*>(to) = bits;
}

// As head_row: elements 4 lane to 4 lane + 3.
template <typename T>
__device__ __forceinline__ void wide_row(float (&row)[4], Args<T> const& args, T const* x, int head, int position) {
    int const first = threadIdx.x % 32 * 4, half = kWideDim / 2;
    bool const is_value = head >= args.heads + args.kv_heads;
    T const* const norm = is_value ? nullptr : head < args.heads ? args.query_norm : args.key_norm;
    bool const rotated = !is_value && args.rotary > 0;
    float weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    float4 cosine = make_float4(1.0f, 1.0f, 1.0f, 1.0f), sine = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_four(x + first, row);
    if (norm != nullptr) load_four(norm + first, weight);
    if (rotated) {
        int64_t const table = int64_t{min(position, args.positions - 1)} * half + first % half;
        cosine = *reinterpret_cast<float4 const*>(args.cosines + table);
        sine = *reinterpret_cast<float4 const*>(args.sines + table);
    }
    if (norm != nullptr) {
        float const inverse_rms = inverse_rms_of(row, args);
#pragma unroll
        for (int j = 0; j < 4; ++j) row[j] = row[j] * inverse_rms * weight[j];
    }
    if (!rotated) return;
    float const cosines[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, sines[4] = {sine.x, sine.y, sine.z, sine.w};
    float const sign = first < half ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float const partner = __shfl_xor_sync(0xffffffffu, row[j], 16);
        row[j] = row[j] * cosines[j] + partner * (sign * sines[j]);
    }
}

template <typename T, bool kFp8>
__device__ __forceinline__ void prepare_wide(Args<T> const& args, Operand<T, kFp8>* queries, int batch, int token,
                                             int head, int position) {
    using Op = Operand<T, kFp8>;
    int const first = threadIdx.x % 32 * 4;
    float row[4];
    wide_row(row, args, given_row(args, batch, token, head), head, position);
    if (head >= args.heads) {
        if (position >= args.capacity) return;
        bool const is_value = head >= args.heads + args.kv_heads;
        int const kv_head = head - args.heads - (is_value ? args.kv_heads : 0);
        int64_t const place = cache_row(args, batch, kv_head, position) * kWideDim + first;
        void* const cache = is_value ? args.values : args.keys;
        if constexpr (kFp8) {
            float const scale = (is_value ? args.value_scale : args.key_scale)[kv_head];
            uint32_t codes = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                codes |= static_cast<uint32_t>(ptx::e4m3_encode(__fdiv_rn(row[j], scale))) << (8 * j);
            }
            *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(cache) + place) = codes;
        } else {
            store_four(static_cast<T*>(cache) + place, row);
        }
        return;
    }
    int64_t const of_head = int64_t{batch} * args.kv_heads + head / args.group;
    Op* const out = queries + (of_head * args.rows() + token * args.group + head % args.group) * kWideDim;
    if constexpr (kFp8) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float const x = ptx::to_float(ptx::from_float<T>(row[j]));
            out[query_place<true>(first + j)] = ptx::from_float<Op>(fminf(fmaxf(x, -65504.0f), 65504.0f));
        }
    } else {
        store_four(out + first, row);
    }
}

// `queries` null: only keys and values.
template <typename T, bool kFp8, int kLaneDims>
__global__ __launch_bounds__(kPrepareThreads, 2) void prepare(Args<T> args, Operand<T, kFp8>* queries) {
    wait_for_kernels_before();
    let_next_kernel_start();
    int const first = queries == nullptr ? args.heads : 0;
    int const heads = args.heads + 2 * args.kv_heads - first;
    int const item = static_cast<int>(blockIdx.x * (kPrepareThreads / 32) + threadIdx.x / 32);
    int const token = item / heads, head = first + item % heads, batch = blockIdx.y;
    if (token >= args.tokens) return;
    Sequence const sequence(args, batch);
    int const position = sequence.past + token;
    T const* const x = given_row(args, batch, token, head);
    if constexpr (sizeof(T) == 2 && kLaneDims * 32 == kWideDim) {
        if (is_wide(args)) {
            prepare_wide<T, kFp8>(args, queries, batch, token, head, position);
            return;
        }
    }
    if (head >= args.heads) {
        if (position < args.capacity) {
            append_row<kLaneDims, kFp8>(args, x, batch, head - args.heads, position);
        }
        return;
    }
    int64_t const row =
        (int64_t{batch} * args.kv_heads + head / args.group) * args.rows() + token * args.group + head % args.group;
    float query[kLaneDims];
    head_row(query, args, x, head, position);
    store_query<T, kFp8, false>(query, args.head_dim, queries + row * args.head_dim);
}

template <typename T, bool kFp8>
TrtNvfp4Status launch_prepare(Args<T> const& args, Operand<T, kFp8>* queries, cudaStream_t stream) {
    return dispatch_head_dim(args.head_dim, [&](auto size) {
        constexpr int kWarps = kPrepareThreads / 32;
        int64_t const items = int64_t{args.tokens} * ((queries == nullptr ? 0 : args.heads) + 2 * args.kv_heads);
        dim3 const blocks(static_cast<unsigned>((items + kWarps - 1) / kWarps), args.batch);
        return launch_kernel(prepare<T, kFp8, decltype(size)::value / 32>, blocks, kPrepareThreads, 0, true, stream,
                             "attention prepare", args, queries);
    });
}

}  // namespace trt_nvfp4::attention
