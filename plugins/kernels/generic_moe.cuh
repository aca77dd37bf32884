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

// y = T(sum of factors * terms), four values a thread. Blocks x, y: a token, a part of its columns, whose terms
// kSharers warps share. Short, because its instructions are fetched anew in every layer.
template <typename T, int kSharers>
__global__ __launch_bounds__(kSumThreads) void generic_moe_sum(MoeTerms terms, T* y) {
    let_next_kernel_start();
    wait_for_kernels_before();
    int const token = blockIdx.x, warp = threadIdx.x / 32, sharer = warp % kSharers;
    int const slice = blockIdx.y * (kSumThreads / 32 / kSharers) + warp / kSharers;
    int const column = (slice * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
    int const ranks = column < terms.width ? terms.ranks() : 0;
    float4 sums = {};
#pragma unroll 1
    for (MoeTerm next = terms.later({}, sharer); next.rank < ranks;) {
        constexpr int kBatch = 4;  // as many trips to L2 at once
        float4 fours[kBatch];
        float factors[kBatch];
        bool has[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            has[i] = next.rank < ranks;
            fours[i] = *reinterpret_cast<float4 const*>(terms.row(token, next, factors[i]) + column);
            next = terms.later(next, kSharers);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (!has[i]) continue;
            sums.x = fmaf(factors[i], fours[i].x, sums.x);
            sums.y = fmaf(factors[i], fours[i].y, sums.y);
            sums.z = fmaf(factors[i], fours[i].z, sums.z);
            sums.w = fmaf(factors[i], fours[i].w, sums.w);
        }
    }
    if constexpr (kSharers > 1) {
        __shared__ float4 sums_of[kSumThreads];
        sums_of[threadIdx.x] = sums;
        __syncthreads();
        if (sharer > 0) return;
#pragma unroll 1
        for (int i = 1; i < kSharers; ++i) {
            float4 const more = sums_of[threadIdx.x + i * 32];
            sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
        }
    }
    if (ranks == 0) return;
    T* const out = y + static_cast<int64_t>(token) * terms.width + column;
    out[0] = ptx::from_float<T>(sums.x);
    out[1] = ptx::from_float<T>(sums.y);
    out[2] = ptx::from_float<T>(sums.z);
    out[3] = ptx::from_float<T>(sums.w);
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
    constexpr int kFewTokens = 64;  // whose sums do not fill a GPU otherwise
    auto const launch = [&](auto sharers) {
        constexpr int kSharers = decltype(sharers)::value, kColumns = 4 * kSumThreads / kSharers;
        dim3 const blocks(static_cast<unsigned>(tokens),
                          static_cast<unsigned>((terms.width + kColumns - 1) / kColumns));
        return launch_kernel(generic_moe_sum<T, kSharers>, blocks, kSumThreads, 0, programmatic, stream,
                             "generic_moe_sum", terms, y);
    };
    return tokens <= kFewTokens ? launch(std::integral_constant<int, kSumThreads / 32>{})
                                : launch(std::integral_constant<int, 1>{});
}

}  // namespace trt_nvfp4
