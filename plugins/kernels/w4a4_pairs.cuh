// What the experts of a mixture see of x, in NVFP4: the rows of the pairs, in the order and the tiles of the jobs.
#pragma once

#include "generic_amax.cuh"
#include "moe_plan.cuh"
#include "nvfp4_matrix.cuh"
#include "quantize_block.cuh"
#include "w4a4_experts.h"

namespace trt_nvfp4 {

constexpr int kPairThreads = 256;
constexpr int kPairSlices = 16;  // blocks that share a job's rows

// x and, where weights scale the input, a pair's weight: x's element i as the pair's expert sees it.
template <typename T>
struct PairInput {
    T const* x;  // [tokens, hidden]
    int64_t hidden;
    int top_k;
    float const* weights;  // [pairs]; null: unscaled

    __device__ __forceinline__ float at(int64_t pair, int64_t i) const {
        float const value = ptx::to_float(x[pair / top_k * hidden + i]);
        return weights == nullptr ? value : ptx::to_float(ptx::from_float<T>(value * weights[pair]));
    }
};

// As generic_amax, of all pairs' rows.
template <typename T>
__global__ __launch_bounds__(kPairThreads) void w4a4_pairs_amax(PairInput<T> input, int64_t pairs,
                                                                float const* given_scale, uint32_t* amax_bits) {
    if (*given_scale != 0.0f) return;
    uint32_t largest = 0;
    for (int64_t i = int64_t{blockIdx.x} * kPairThreads + threadIdx.x; i < pairs * input.hidden;
         i += int64_t{gridDim.x} * kPairThreads) {
        largest = max(largest, ptx::magnitude_bits(input.at(i / input.hidden, i % input.hidden)));
    }
    largest = ptx::warp_max(largest);
    if (threadIdx.x % 32 == 0) atomicMax(amax_bits, largest);
}

// Row i of job blockIdx.x to row i of tile blockIdx.x; what pads a tile is not written. A thread per block of 16
// values.
template <typename T>
__global__ __launch_bounds__(kPairThreads) void w4a4_pairs_quantize(PairInput<T> input, MoePlan plan,
                                                                    float const* given_scale, Nvfp4Matrix out) {
    int const tile = static_cast<int>(blockIdx.x);
    if (tile >= *plan.job_count) return;
    ExpertJob const job = plan.jobs[tile];
    float const tensor_scale = resolve_tensor_scale(*given_scale, out.amax_bits);
    if (tile == 0 && blockIdx.y == 0 && threadIdx.x == 0) *out.tensor_scale = tensor_scale;
    int64_t const blocks_padded = padded_blocks(input.hidden);
    for (int i = static_cast<int>(blockIdx.y); i < job.count; i += kPairSlices) {
        int64_t const pair = plan.order[job.first + i];
        int64_t const row = int64_t{tile} * kExpertRows + i;
        for (int64_t block = threadIdx.x; block < blocks_padded; block += kPairThreads) {
            uint8_t* const block_scale = out.block_scales + scale_offset(row, block, blocks_padded);
            if (block >= input.hidden / kBlock) {
                *block_scale = 0;
                continue;
            }
            float values[kBlock];
            uint32_t amax_bits = 0;
#pragma unroll
            for (int j = 0; j < kBlock; ++j) {
                values[j] = input.at(pair, block * kBlock + j);
                amax_bits = max(amax_bits, ptx::magnitude_bits(values[j]));
            }
            BlockQuantizer const quantizer(amax_bits, tensor_scale);
            *block_scale = quantizer.block_scale;
            *reinterpret_cast<uint2*>(out.packed + (row * input.hidden + block * kBlock) / 2) =
                quantizer.encode(values);
        }
    }
}

// `jobs`: the most that the plan can hold. `static_scale`: the given scale is known not to be 0.
template <typename T>
TrtNvfp4Status launch_quantize_pairs(PairInput<T> const& input, int64_t tokens, int64_t jobs, MoePlan const& plan,
                                     float const* given_scale, bool static_scale, Nvfp4Matrix const& out,
                                     cudaStream_t stream) {
    if (!static_scale && input.weights == nullptr) {
        // Every token is some pair's.
        TRT_NVFP4_RETURN_IF_ERROR(launch_amax(input.x, tokens * input.hidden, given_scale, out.amax_bits, stream));
    } else if (!static_scale) {
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(out.amax_bits, 0, sizeof(uint32_t), stream), "clear amax"));
        int64_t const pairs = tokens * input.top_k;
        int64_t const blocks = (pairs * input.hidden + kPairThreads - 1) / kPairThreads;
        w4a4_pairs_amax<<<static_cast<unsigned>(std::min<int64_t>(blocks, kAmaxMaxBlocks)), kPairThreads, 0, stream>>>(
            input, pairs, given_scale, out.amax_bits);
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetLastError(), "w4a4_pairs_amax"));
    }
    w4a4_pairs_quantize<<<dim3(static_cast<unsigned>(jobs), kPairSlices), kPairThreads, 0, stream>>>(input, plan,
                                                                                                     given_scale, out);
    return check_cuda(cudaGetLastError(), "w4a4_pairs_quantize");
}

}  // namespace trt_nvfp4
