// What blocks that share a sequence's keys leave for each other: sums that are not yet divided, by split and row.
#pragma once

#include "attention/fragments.cuh"
#include "attention/shares.cuh"

namespace trt_nvfp4::attention {

constexpr int kRows = 16;  // of a KV head that one block takes

// [kv_heads * chunks, slots, kRows] of values, and of their maximum and weight.
struct Partials {
    float* values;      // each head_dim
    float2* softmaxes;  // (largest, weight)
    int slots;

    __device__ int64_t row(int chunk, int slot, int row) const { return (int64_t{chunk} * slots + slot) * kRows + row; }
};

// The last step of a row: the sink's share, the values' scale, one division. A row that attends to nothing is 0.
template <typename T, bool kFp8>
struct Finish {
    float factor, shrink;  // of sums that were made under `largest`

    __device__ Finish(Args<T> const& args, int head, float largest, float weight) {
        float const sink = args.sinks == nullptr ? -INFINITY : args.sinks[head] * kLog2E;
        float const top = fmaxf(largest, sink);
        shrink = top == -INFINITY ? 0.0f : ptx::exp2(largest - top);
        float const total = weight * shrink + (sink == -INFINITY ? 0.0f : ptx::exp2(sink - top));
        float const scale = kFp8 ? args.value_scale[head / args.group] * kE4m3InHalf : 1.0f;
        factor = total == 0.0f ? 0.0f : scale * shrink / total;
    }
};

}  // namespace trt_nvfp4::attention
