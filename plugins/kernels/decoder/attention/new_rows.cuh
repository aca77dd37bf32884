// Second phase: new queries, keys and values come from the projection; keys and values are appended to the caches.
#pragma once

#include "attention/head_row.cuh"
#include "decoder/attention/layout.cuh"
#include "ptx/prefetch.cuh"

namespace trt_nvfp4::decoder {

// To L2, while the new rows are awaited: what their norm and rotation take.
template <typename T>
__device__ __forceinline__ void prefetch_tables(DecoderArgs<T> const& args, AttentionItem const& item) {
    attention::Args<T> const& call = args.attention;
    int const half = call.rotary / 2, warp = threadIdx.x / 32, at = threadIdx.x % 32;
    if (warp < 2 && call.query_norm != nullptr && at * 64 < call.head_dim) {
        ptx::prefetch((warp == 0 ? call.query_norm : call.key_norm) + item.layer * call.head_dim + at * 64);
    }
    if (warp >= 2 && warp - 2 < call.tokens && at < 8 && at % 4 * 32 < half) {
        int64_t const row = int64_t{min(item.past + warp - 2, call.positions - 1)} * half;
        ptx::prefetch((at < 4 ? call.cosines : call.sines) + row + at % 4 * 32);
    }
}

// New rows come as words, queries, and keys and values of tokens in reach; these are appended.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void prepare_item(DecoderArgs<T> const& args, AttentionItem const& item, uint8_t* shared) {
    using Config = Attend<T, kFp8, kHeadDim>;
    attention::Args<T> const& call = args.attention;  // of layer 0: for its sizes
    T* const given = reinterpret_cast<T*>(shared + Config::kQueryBytes);
    T* const given_new = given + kRows * kHeadDim;
    // All queries, in work items without keys too: what is published then is nobody's of the layer before. Keys and
    // values beside them, so that their trips to L2 do not follow one another.
    int const rows = item.rows + 2 * item.new_tokens, eights_of_row = call.head_dim / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * eights_of_row; i += w4a16::kThreads) {
        int const row = args.by_eights.of(i), of_new = row - item.rows;
        bool const is_query = of_new < 0;
        int const token = is_query ? item.token_of(args, row) : item.first_new - item.past + of_new / 2;
        int const head = is_query ? item.head_of(args, row) : call.heads + item.kv_head + of_new % 2 * call.kv_heads;
        int const all = call.heads + 2 * call.kv_heads, offset = (i - row * eights_of_row) * 8;
        uint32_t const* const words =
            args.qkv + ((item.batch * call.tokens + token) * all + head) * call.head_dim + offset;
        w4a16::TaggedEight eight;
        eight.load(words);
        while (!eight.is_of(item.layer)) {
            __nanosleep(w4a16::kPollPause);
            eight.load(words);
        }
        T* const out = is_query ? given + row * call.head_dim : given_new + of_new * call.head_dim;
        *reinterpret_cast<uint4*>(out + offset) = eight.values();
    }
    w4a16::sync_warps();
    constexpr int kPitch = attention::kQueryPitch<kHeadDim>;
    for (int i = item.rows * (kPitch / 16) + threadIdx.x; i < kRows * (kPitch / 16); i += w4a16::kThreads) {
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    // In the program once, for its size.
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < item.rows + 2 * item.new_tokens; i += w4a16::kWarps) {
        int const of_new = i - item.rows, kv_index = item.kv_head + of_new % 2 * call.kv_heads;
        bool const is_query = of_new < 0;
        int const head = is_query ? item.head_of(args, i) : call.heads + kv_index;
        int const position = is_query ? item.past + item.token_of(args, i) : item.first_new + of_new / 2;
        attention::Args<T> const own = args.attention_of(item.layer);
        float row[Config::kLaneDims] = {};
        attention::head_row(row, own, (is_query ? given + i * call.head_dim : given_new + of_new * call.head_dim), head,
                            position);
        if (is_query) {
            using Op = attention::Operand<T, kFp8>;
            attention::store_query<T, kFp8, true>(row, call.head_dim, reinterpret_cast<Op*>(shared + i * kPitch));
        } else {
            attention::store_row<Config::kLaneDims, kFp8>(own, row, item.batch, kv_index, position);
        }
    }
    w4a16::sync_warps();
}

}  // namespace trt_nvfp4::decoder
