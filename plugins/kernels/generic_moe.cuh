// NVFP4MoE and FP8MoE for any shape and type: rows gathered in the order of their experts, a tile of GEMM per job, and
// the sum.
#pragma once

#include "generic_gemm.cuh"
#include "moe_plan.cuh"
#include "programmatic_launch.cuh"

namespace trt_nvfp4 {

constexpr int kMoeThreads = 256;
constexpr int kSumThreads = 128;

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

// As generic_gemm, the weights being those of all experts: blockIdx.y is a job of at most kGemmTile rows.
template <typename A, typename T, typename Out, typename W>
__global__ __launch_bounds__(kGemmThreads) void generic_expert_gemm(A a, GemmArgs<T, Out, W> args, MoePlan plan) {
    if (static_cast<int>(blockIdx.y) >= *plan.job_count) return;
    ExpertJob const job = plan.jobs[blockIdx.y];
    args.m = job.first + job.count;
    args.w = weights_of(args.w, job.expert, args.n, args.k);
    args.bias += job.expert * args.n;
    gemm_tile(a, args, job.first, int64_t{blockIdx.x} * kGemmTile);
}

// y = T(sum of factors * terms), four values a thread. `slices` blocks share a token.
template <typename T>
__global__ __launch_bounds__(kSumThreads) void generic_moe_sum(MoeTerms terms, int slices, T* y) {
    let_next_kernel_start();
    wait_for_kernels_before();
    int const token = static_cast<int>(blockIdx.x) / slices;
    int const i = (static_cast<int>(blockIdx.x) % slices * kSumThreads + static_cast<int>(threadIdx.x)) * 4;
    if (i >= terms.width) return;
    int const count = terms.count();
    float sums[4] = {};
    constexpr int kBatch = 8;  // as many trips to L2 at once
    for (int first = 0; first < count; first += kBatch) {
        float const* rows[kBatch];
        float factors[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) rows[j] = terms.row(token, min(first + j, count - 1), factors[j]);
        float4 fours[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) fours[j] = *reinterpret_cast<float4 const*>(rows[j] + i);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            if (first + j >= count) break;
            sums[0] = fmaf(factors[j], fours[j].x, sums[0]);
            sums[1] = fmaf(factors[j], fours[j].y, sums[1]);
            sums[2] = fmaf(factors[j], fours[j].z, sums[2]);
            sums[3] = fmaf(factors[j], fours[j].w, sums[3]);
        }
    }
    T* const out = y + static_cast<int64_t>(token) * terms.width + i;
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = ptx::from_float<T>(sums[j]);
}

template <typename T>
TrtNvfp4Status launch_moe_gather(T const* x, int64_t hidden, int top_k, bool scale_input, int64_t pairs,
                                 MoePlan const& plan, T* out, cudaStream_t stream) {
    generic_moe_gather<<<static_cast<unsigned>(pairs), kMoeThreads, 0, stream>>>(x, hidden, top_k, scale_input, plan,
                                                                                 out);
    return check_cuda(cudaGetLastError(), "generic_moe_gather");
}

template <typename A, typename T, typename Out, typename W>
TrtNvfp4Status launch_expert_gemm(A const& a, GemmArgs<T, Out, W> const& args, int64_t jobs, MoePlan const& plan,
                                  cudaStream_t stream) {
    dim3 const grid(static_cast<unsigned>((args.n + kGemmTile - 1) / kGemmTile), static_cast<unsigned>(jobs));
    generic_expert_gemm<<<grid, kGemmThreads, 0, stream>>>(a, args, plan);
    return check_cuda(cudaGetLastError(), "generic_expert_gemm");
}

// `outputs` and `shared` as MoeTerms has them.
template <typename T>
TrtNvfp4Status launch_moe_sum(float const* outputs, float const* shared, int splits, int64_t tokens, int64_t hidden,
                              int top_k, bool scale_input, MoePlan const& plan, T* y, bool programmatic,
                              cudaStream_t stream) {
    MoeTerms const terms{plan,       outputs, shared, splits, static_cast<int>(tokens), top_k, static_cast<int>(hidden),
                         scale_input};
    int const slices = (terms.width + 4 * kSumThreads - 1) / (4 * kSumThreads);
    return launch_kernel(generic_moe_sum<T>, static_cast<unsigned>(tokens * slices), kSumThreads, 0, programmatic,
                         stream, "generic_moe_sum", terms, slices, y);
}

}  // namespace trt_nvfp4
