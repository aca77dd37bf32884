// Adds what the blocks of a split sequence left (sm80_attention_decode.cuh), in the order of the keys. One block per
// query; its warps take every eighth split.
#pragma once

#include "attention/partials.cuh"
#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;

template <typename T, bool kFp8, int kHeadDim>
__global__ __launch_bounds__(kCombineThreads) void sm80_attention_combine(Args<T> args, int block_keys,
                                                                          Partials partials) {
    constexpr int kLaneDims = kHeadDim / 32;
    __shared__ float sums[kCombineWarps][kHeadDim];
    __shared__ float2 softmaxes[kCombineWarps];
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const row = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
    int const chunks = (args.rows() + kRows - 1) / kRows, chunk = kv_head * chunks + row / kRows;
    // Lengths are as the kernel before this one found them.
    Share const share =
        find_share(args, partials.slots, block_keys, [&](int found, int, int) { return found == batch; });
    let_next_kernel_start();
    wait_for_kernels_before();
    if (share.splits == 1) return;  // the block that had it wrote the output
    float largest = -INFINITY, weight = 0.0f, sum[kLaneDims] = {};
#pragma unroll 4
    for (int split = warp; split < share.splits; split += kCombineWarps) {
        int64_t const place = partials.row(chunk, share.first_slot + split, row % kRows);
        float2 const softmax = partials.softmaxes[place];
        float values[kLaneDims];
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
            int const i = lane + 32 * j;
            values[j] = i < args.head_dim ? partials.values[place * args.head_dim + i] : 0.0f;
        }
        float const top = fmaxf(largest, softmax.x), base = top == -INFINITY ? 0.0f : top;
        float const shrink = ptx::exp2(largest - base), part = ptx::exp2(softmax.x - base);
        largest = top;
        weight = weight * shrink + softmax.y * part;
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) sum[j] = sum[j] * shrink + values[j] * part;
    }
    if (lane == 0) softmaxes[warp] = make_float2(largest, weight);
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) sums[warp][lane + 32 * j] = sum[j];
    __syncthreads();

    float top = -INFINITY, total = 0.0f;
    for (int w = 0; w < kCombineWarps; ++w) top = fmaxf(top, softmaxes[w].x);
    float const base = top == -INFINITY ? 0.0f : top;
    float shrinks[kCombineWarps];
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) {
        shrinks[w] = ptx::exp2(softmaxes[w].x - base);
        total += softmaxes[w].y * shrinks[w];
    }
    Finish<T, kFp8> const finish(args, kv_head * args.group + row % args.group, top, total);
    T* const y = output_row(args, batch, kv_head, row);
#pragma unroll 1
    for (int i = threadIdx.x; i < args.head_dim; i += kCombineThreads) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < kCombineWarps; ++w) value += sums[w][i] * shrinks[w];
        y[i] = ptx::from_float<T>(value * finish.factor);
    }
}

}  // namespace trt_nvfp4::attention
