// The end of a mixture of experts: a token's output is the weighted sum of its experts' and their parts.
#pragma once

#include <type_traits>

#include "common/programmatic_launch.cuh"
#include "moe/moe_plan.cuh"
#include "ptx/element.cuh"

namespace trt_nvfp4 {

constexpr int kSumThreads = 128;

// When the sum starts: once the kernels before have ended, or early, to wait for them itself. Where the last of them
// starts its dependents once it has the plan, terms are found before the wait.
enum class SumStart { kBehind, kEarly, kEarlyWithPlan };

// y = T(sum of factors * terms), four values a thread. Blocks x, y: a token, a part of its columns, whose terms
// kSharers warps share. Terms are found while those before are in flight. Its instructions are fetched anew in every
// layer: what is unrolled here costs more than it saves.
template <typename T, int kSharers>
__global__ __launch_bounds__(kSumThreads) void moe_sum(MoeTerms terms, bool has_plan, T* y) {
    constexpr int kBatch = 4;  // as many trips to L2 at once
    let_next_kernel_start();
    if (!has_plan) wait_for_kernels_before();
    int const token = blockIdx.x, warp = threadIdx.x / 32, sharer = warp % kSharers;
    int const slice = blockIdx.y * (kSumThreads / 32 / kSharers) + warp / kSharers;
    int const column = (slice * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
    int const ranks = column < terms.width ? terms.ranks() : 0;
    MoeTerm next = terms.later({}, sharer);
    float const* rows[kBatch];
    float factors[kBatch];
    bool has[kBatch];
    auto const find = [&] {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            has[i] = next.rank < ranks;
            rows[i] = terms.row(token, next, factors[i]) + column;
            if (!has[i]) factors[i] = 0.0f;
            next = terms.later(next, kSharers);
        }
    };
    find();
    if (has_plan) wait_for_kernels_before();
    float4 sums = {};
#pragma unroll 1
    while (has[0]) {
        float4 fours[kBatch];
        float now[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            fours[i] = has[i] ? __ldcg(reinterpret_cast<float4 const*>(rows[i])) : float4{};
            now[i] = factors[i];
        }
        find();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            sums.x = fmaf(now[i], fours[i].x, sums.x);
            sums.y = fmaf(now[i], fours[i].y, sums.y);
            sums.z = fmaf(now[i], fours[i].z, sums.z);
            sums.w = fmaf(now[i], fours[i].w, sums.w);
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

// `outputs` and `shared` as MoeTerms has them.
template <typename T>
TrtNvfp4Status launch_moe_sum(float const* outputs, float const* shared, int splits, int64_t tokens, int64_t hidden,
                              int top_k, bool scale_input, MoePlan const& plan, T* y, SumStart start,
                              cudaStream_t stream) {
    MoeTerms const terms{plan,       outputs, shared, splits, static_cast<int>(tokens), top_k, static_cast<int>(hidden),
                         scale_input};
    constexpr int kFewTokens = 64;  // whose sums do not fill a GPU otherwise
    auto const launch = [&](auto sharers) {
        constexpr int kSharers = decltype(sharers)::value, kColumns = 4 * kSumThreads / kSharers;
        dim3 const blocks(static_cast<unsigned>(tokens),
                          static_cast<unsigned>((terms.width + kColumns - 1) / kColumns));
        return launch_kernel(moe_sum<T, kSharers>, blocks, kSumThreads, 0, start != SumStart::kBehind, stream,
                             "moe_sum", terms, start == SumStart::kEarlyWithPlan, y);
    };
    return tokens <= kFewTokens ? launch(std::integral_constant<int, kSumThreads / 32>{})
                                : launch(std::integral_constant<int, 1>{});
}

}  // namespace trt_nvfp4
