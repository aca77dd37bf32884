// NVFP4MoE and FP8MoE for any shape and type: rows gathered in the order of their experts, and a tile of GEMM per work
// item.
#pragma once

#include "generic/generic_gemm.cuh"
#include "moe/moe_plan.cuh"

namespace trt_nvfp4 {

constexpr int kMoeThreads = 256;

// Row p of out: token's x of the pair at position p, times the pair's weight where weights scale the input.
template <typename T>
__global__ __launch_bounds__(kMoeThreads) void generic_moe_gather(T const* x, int64_t hidden, int top_k,
                                                                  bool scale_input, MoePlan plan, T* out) {
    int const pair = plan.order[blockIdx.x];
    T const* const source = x + pair / top_k * hidden;
    float const weight = scale_input ? plan.weights[pair] : 1.0f;
    for (int64_t i = threadIdx.x; i < hidden; i += kMoeThreads) {
        out[blockIdx.x * hidden + i] = ptx::from_float<T>(ptx::to_float(source[i]) * weight);
    }
}

// One expert's weights of all experts'.
__device__ __forceinline__ Nvfp4Rows weights_of(Nvfp4Rows w, int64_t expert, int64_t n, int64_t k) {
    w.packed += expert * (n * k / 2);
    w.block_scales += expert * scale_bytes(n, k);
    w.tensor_scale += expert;
    return w;
}

__device__ __forceinline__ Fp8Channels weights_of(Fp8Channels w, int64_t expert, int64_t n, int64_t k) {
    w.values += expert * n * k;
    w.scales += expert * n;
    return w;
}

// As generic_gemm, the weights being those of all experts: blockIdx.y is a work item of at most kGemmTile rows.
template <typename A, typename T, typename Out, typename W>
__global__ __launch_bounds__(kGemmThreads) void generic_expert_gemm(A a, GemmArgs<T, Out, W> args, MoePlan plan) {
    // One dimension for both: there may be more work items than the second one's limit, 65535.
    auto const tiles = static_cast<unsigned>((args.n + kGemmTile - 1) / kGemmTile);
    unsigned const index = blockIdx.x / tiles;
    if (static_cast<int>(index) >= *plan.item_count) return;
    WorkItem const item = plan.items[index];
    args.m = item.first + item.count;
    args.w = weights_of(args.w, item.expert, args.n, args.k);
    args.bias += item.expert * args.n;
    gemm_tile(a, args, item.first, int64_t{blockIdx.x % tiles} * kGemmTile);
}

template <typename T>
TrtNvfp4Status launch_moe_gather(T const* x, int64_t hidden, int top_k, bool scale_input, int64_t pairs,
                                 MoePlan const& plan, T* out, cudaStream_t stream) {
    return launch_kernel(generic_moe_gather<T>, static_cast<unsigned>(pairs), kMoeThreads, 0, false, stream,
                         "generic_moe_gather", x, hidden, top_k, scale_input, plan, out);
}

template <typename A, typename T, typename Out, typename W>
TrtNvfp4Status launch_expert_gemm(A const& a, GemmArgs<T, Out, W> const& args, int64_t items, MoePlan const& plan,
                                  cudaStream_t stream) {
    auto const grid = static_cast<unsigned>((args.n + kGemmTile - 1) / kGemmTile * items);
    return launch_kernel(generic_expert_gemm<A, T, Out, W>, grid, kGemmThreads, 0, false, stream, "generic_expert_gemm",
                         a, args, plan);
}

}  // namespace trt_nvfp4
