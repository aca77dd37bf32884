// Laying out and making the plan of a mixture of experts, for the launchers.
#pragma once

#include "../moe_plan.cuh"
#include "launch.h"

namespace trt_nvfp4 {

constexpr int kMoeFewestJobTokens = 32;  // of any GPU's jobs: sizes the plan

inline MoePlan take_plan(Workspace& workspace, int64_t tokens, int64_t top_k, int64_t experts) {
    int64_t const pairs = tokens * top_k;
    MoePlan plan{};
    plan.experts = workspace.take<int>(pairs);
    plan.weights = workspace.take<float>(pairs);
    plan.position = workspace.take<int>(pairs);
    plan.order = workspace.take<int>(pairs);
    plan.shared_factor = workspace.take<float>(tokens);
    plan.jobs = workspace.take<ExpertJob>(most_jobs(pairs, experts, kMoeFewestJobTokens));
    plan.job_count = workspace.take<int>(1);
    plan.total_cost = workspace.take<int>(1);
    return plan;
}

// Routing of `tokens` tokens from `first` on; nothing is erased.
inline RouteArgs route_args(TrtNvfp4MoeArgs const& args, MoePlan const& plan, int64_t first, int64_t tokens,
                            int job_tokens) {
    RouteArgs route{};
    int64_t const element = args.dtype == TRT_NVFP4_FLOAT32 ? 4 : 2;
    route.scoring = args.scoring;
    route.renormalize = args.renormalize != 0;
    route.tokens = static_cast<int>(tokens);
    route.experts = static_cast<int>(args.experts);
    route.hidden = static_cast<int>(args.hidden);
    route.top_k = args.top_k;
    route.groups = args.groups;
    route.open_groups = args.open_groups;
    route.group_score_top = args.group_score_top;
    route.scaling_factor = args.scaling_factor;
    route.logits = args.router_logits + first * args.experts;
    route.correction_bias = args.correction_bias;
    route.x = static_cast<uint8_t const*>(args.x) + first * args.hidden * element;
    route.shared_gate = args.shared && args.shared_gated ? args.shared_gate : nullptr;
    route.plan = plan;
    route.job_tokens = job_tokens;
    return route;
}

// The kernels that fill in the plan and erase. T is the activations' type.
template <typename T>
TrtNvfp4Status launch_plan(RouteArgs const& args, cudaStream_t stream);

}  // namespace trt_nvfp4
