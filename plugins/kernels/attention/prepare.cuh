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

// `queries` null: keys and values alone.
template <typename T, bool kFp8, int kLaneDims>
__global__ __launch_bounds__(kPrepareThreads, 2) void prepare(Args<T> args, Operand<T, kFp8>* queries) {
    wait_for_kernels_before();
    let_next_kernel_start();
    int const first = queries == nullptr ? args.heads : 0;
    int const heads = args.heads + 2 * args.kv_heads - first;
    int const job = static_cast<int>(blockIdx.x * (kPrepareThreads / 32) + threadIdx.x / 32);
    int const token = job / heads, head = first + job % heads, batch = blockIdx.y;
    if (token >= args.tokens) return;
    Sequence const sequence(args, batch);
    int const position = sequence.past + token;
    T const* const x = given_row(args, batch, token, head);
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
        int64_t const jobs = int64_t{args.tokens} * ((queries == nullptr ? 0 : args.heads) + 2 * args.kv_heads);
        dim3 const blocks(static_cast<unsigned>((jobs + kWarps - 1) / kWarps), args.batch);
        return launch_kernel(prepare<T, kFp8, decltype(size)::value / 32>, blocks, kPrepareThreads, 0, true, stream,
                             "attention prepare", args, queries);
    });
}

}  // namespace trt_nvfp4::attention
