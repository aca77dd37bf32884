// What the experts of a mixture see of x: the rows of the pairs, quantized, in the order and the tiles of the work
// items.
#pragma once

#include "common/programmatic_launch.cuh"
#include "generic/generic_amax.cuh"
#include "moe/moe_plan.cuh"

namespace trt_nvfp4 {

constexpr int kPairThreads = 256;
constexpr int kPairSlices = 16;  // blocks that share a work item's rows
constexpr int kPairBlock = 16;   // values that a thread quantizes at a time; the hidden size is a multiple

// x and, where weights scale the input, a pair's weight: 16 of x's elements as the pair's expert sees them.
template <typename T>
struct PairInput {
    T const* x;  // [tokens, hidden]
    int64_t hidden;
    int top_k;
    float const* weights;  // [pairs]; null: unscaled

    __device__ __forceinline__ void load(float (&values)[kPairBlock], int64_t pair, int64_t block) const {
        constexpr int kWidth = 16 / sizeof(T);
        T const* const from = x + pair / top_k * hidden + block * kPairBlock;
        float const weight = weights == nullptr ? 1.0f : weights[pair];
#pragma unroll
        for (int i = 0; i < kPairBlock; i += kWidth) {
            uint4 const word = *reinterpret_cast<uint4 const*>(from + i);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                float const value = ptx::to_float(reinterpret_cast<T const*>(&word)[j]);
                values[i + j] = weights == nullptr ? value : ptx::to_float(ptx::from_float<T>(value * weight));
            }
        }
    }
};

// As generic_amax, of all pairs' rows.
template <typename T>
__global__ __launch_bounds__(kPairThreads) void moe_pairs_amax(PairInput<T> input, int64_t pairs,
                                                               float const* given_scale, uint32_t* amax_bits) {
    if (*given_scale != 0.0f) return;
    int64_t const blocks = input.hidden / kPairBlock;
    uint32_t largest = 0;
    for (int64_t i = int64_t{blockIdx.x} * kPairThreads + threadIdx.x; i < pairs * blocks;
         i += int64_t{gridDim.x} * kPairThreads) {
        float values[kPairBlock];
        input.load(values, i / blocks, i % blocks);
#pragma unroll
        for (float const value : values) largest = max(largest, ptx::magnitude_bits(value));
    }
    largest = ptx::warp_max(largest);
    if (threadIdx.x % 32 == 0) atomicMax(amax_bits, largest);
}

// Row i of a work item to row i of its tile; what pads a tile is not written. `Rows` is a number format's: how many
// blocks a row has, padding included, the scale of all rows, and how a block is stored.
template <typename T, class Rows>
__global__ __launch_bounds__(kPairThreads) void moe_pairs_quantize(PairInput<T> input, MoePlan plan, Rows rows) {
    let_next_kernel_start();
    wait_for_kernels_before();
    int const tile = static_cast<int>(blockIdx.x) / kPairSlices;
    int const slice = static_cast<int>(blockIdx.x) % kPairSlices;
    if (tile >= *plan.item_count) return;
    WorkItem const item = plan.items[tile];
    float const scale = rows.scale();
    if (blockIdx.x == 0 && threadIdx.x == 0) rows.keep(scale);
    int const blocks = rows.blocks(input.hidden);
    for (int i = slice * kPairThreads + threadIdx.x; i < item.count * blocks; i += kPairSlices * kPairThreads) {
        int const row = i / blocks;
        rows.store(input, plan.order[item.first + row], int64_t{tile} * rows.tile_rows + row, i - row * blocks, scale);
    }
}

// `items`: the most that the plan can hold. `static_scale`: the given scale is known not to be 0; otherwise
// rows.scale() may need `amax_bits`.
template <typename T, class Rows>
TrtNvfp4Status launch_quantize_pairs(PairInput<T> const& input, int64_t tokens, int64_t items, MoePlan const& plan,
                                     float const* given_scale, bool static_scale, uint32_t* amax_bits, Rows const& rows,
                                     cudaStream_t stream) {
    if (!static_scale && input.weights == nullptr) {
        // Every token is some pair's.
        TRT_NVFP4_RETURN_IF_ERROR(launch_amax(input.x, tokens * input.hidden, given_scale, amax_bits, stream));
    } else if (!static_scale) {
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaMemsetAsync(amax_bits, 0, sizeof(uint32_t), stream), "clear amax"));
        int64_t const pairs = tokens * input.top_k;
        int64_t const blocks = (pairs * input.hidden / kPairBlock + kPairThreads - 1) / kPairThreads;
        TRT_NVFP4_RETURN_IF_ERROR(
            launch_kernel(moe_pairs_amax<T>, static_cast<unsigned>(std::min<int64_t>(blocks, kAmaxMaxBlocks)),
                          kPairThreads, 0, false, stream, "moe_pairs_amax", input, pairs, given_scale, amax_bits));
    }
    return launch_kernel(moe_pairs_quantize<T, Rows>, items * kPairSlices, kPairThreads, 0, true, stream,
                         "moe_pairs_quantize", input, plan, rows);
}

}  // namespace trt_nvfp4
