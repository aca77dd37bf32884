// Cached attention for every head size up to kMaxHeadDim and every type, in float32: the yardstick of the fast kernels.
// One block per query; its warps take every fourth key, and their sums are added in a fixed order.
#pragma once

#include "attention/head_row.cuh"
#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::attention {

constexpr int kGenericThreads = 128;
constexpr int kGenericWarps = kGenericThreads / 32;

template <typename T, bool kFp8>
__device__ __forceinline__ float cached(void const* cache, int64_t index) {
    if constexpr (kFp8) return ptx::e4m3_decode(static_cast<uint8_t const*>(cache)[index]);
    return ptx::to_float(static_cast<T const*>(cache)[index]);
}

template <typename T, bool kFp8>
__global__ __launch_bounds__(kGenericThreads) void generic_attention(Args<T> args) {
    __shared__ float sums[kGenericWarps][kMaxHeadDim];
    __shared__ float maxima[kGenericWarps], weights[kGenericWarps];
    wait_for_kernels_before();
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const head = blockIdx.x % args.heads, token = blockIdx.x / args.heads, batch = blockIdx.y;
    int const kv_head = head / args.group;
    Sequence const sequence(args, batch);
    int const position = sequence.past + token;

    float query[kLaneDims], sum[kLaneDims] = {};
    float const scale = args.scale * (kFp8 ? args.key_scale[kv_head] : 1.0f);
    head_row(query, args, given_row(args, batch, token, head), head, position);
    for (float& x : query) x = ptx::to_float(ptx::from_float<T>(x));

    float largest = -INFINITY, weight = 0.0f;
    for (int key = sequence.first + warp; key < sequence.length; key += kGenericWarps) {
        if (!visible(key, position, args.window)) continue;
        int64_t const offset = cache_row(args, batch, kv_head, key) * args.head_dim;
        float dot = 0.0f;
        for (int j = 0; j < kLaneDims; ++j) {
            int const i = lane + 32 * j;
            if (i < args.head_dim) dot += query[j] * cached<T, kFp8>(args.keys, offset + i);
        }
        float score = ptx::warp_sum(dot) * scale;
        if (args.softcap > 0.0f) score = args.softcap * tanhf(score / args.softcap);
        float const larger = fmaxf(largest, score);
        float const shrink = expf(largest - larger), probability = expf(score - larger);
        largest = larger;
        weight = weight * shrink + probability;
        for (int j = 0; j < kLaneDims; ++j) {
            int const i = lane + 32 * j;
            if (i < args.head_dim) sum[j] = sum[j] * shrink + probability * cached<T, kFp8>(args.values, offset + i);
        }
    }
    for (int j = 0; j < kLaneDims; ++j) sums[warp][lane + 32 * j] = sum[j];
    if (lane == 0) {
        maxima[warp] = largest;
        weights[warp] = weight;
    }
    __syncthreads();

    float const sink = args.sinks == nullptr ? -INFINITY : args.sinks[head];
    float top = sink;
    for (int w = 0; w < kGenericWarps; ++w) top = fmaxf(top, maxima[w]);
    if (top == -INFINITY) top = 0.0f;  // no key at all
    float total = expf(sink - top);
    for (int w = 0; w < kGenericWarps; ++w) total += weights[w] * expf(maxima[w] - top);
    float const factor = (kFp8 ? args.value_scale[kv_head] : 1.0f) / total;
    T* const y = output_row(args, batch, kv_head, token * args.group + head % args.group);
    for (int i = threadIdx.x; i < args.head_dim; i += kGenericThreads) {
        float value = 0.0f;
        for (int w = 0; w < kGenericWarps; ++w) value += sums[w][i] * expf(maxima[w] - top);
        y[i] = ptx::from_float<T>(total == 0.0f ? 0.0f : value * factor);  // NaN stays NaN
    }
}

template <typename T, bool kFp8>
TrtNvfp4Status launch_generic_attention(Args<T> const& args, cudaStream_t stream) {
    dim3 const blocks(args.tokens * args.heads, args.batch);
    return launch_kernel(generic_attention<T, kFp8>, blocks, kGenericThreads, 0, true, stream, "generic_attention",
                         args);
}

}  // namespace trt_nvfp4::attention
