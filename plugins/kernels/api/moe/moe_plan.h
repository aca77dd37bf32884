// Checking the arguments of a mixture of experts, laying out and making its plan: for the launchers.
#pragma once

#include "api/validate.h"
#include "moe/moe_plan.cuh"

namespace trt_nvfp4 {

constexpr int kMoeFewestItemTokens = 8;  // of any kernel's work items: sizes the plan

// What NVFP4MoE and FP8MoE ask of their arguments.
inline TrtNvfp4Status require_moe(char const* op, TrtNvfp4MoeArgs const& args) {
    auto const in_range = [op](char const* what, int64_t value, int64_t least, int64_t most) {
        if (value >= least && value <= most) return TRT_NVFP4_SUCCESS;
        return record_error(TRT_NVFP4_INVALID_ARGUMENT, std::string(op) + ": " + what + " must be " +
                                                            std::to_string(least) + " to " + std::to_string(most) +
                                                            ", it is " + std::to_string(value));
    };
    auto const in_blocks = [op](char const* what, int64_t k) {
        if (k > 0 && k % 16 == 0) return TRT_NVFP4_SUCCESS;
        return require_blocks((std::string(op) + ": " + what).c_str(), k);
    };
    TRT_NVFP4_RETURN_IF_ERROR(require_rows(op, args.m));
    TRT_NVFP4_RETURN_IF_ERROR(in_blocks("the hidden size", args.hidden));
    TRT_NVFP4_RETURN_IF_ERROR(in_blocks("the intermediate size", args.intermediate));
    if (args.shared) {
        TRT_NVFP4_RETURN_IF_ERROR(in_blocks("the shared expert's intermediate size", args.shared_intermediate));
    }
    TRT_NVFP4_RETURN_IF_ERROR(in_range("the number of experts", args.experts, 1, TRT_NVFP4_MAX_EXPERTS));
    TRT_NVFP4_RETURN_IF_ERROR(in_range("scoring", args.scoring, TRT_NVFP4_SOFTMAX, TRT_NVFP4_GIVEN));
    TRT_NVFP4_RETURN_IF_ERROR(in_range("n_group", args.groups, 1, args.experts));
    if (args.experts % args.groups != 0) {
        return record_error(TRT_NVFP4_INVALID_ARGUMENT,
                            std::string(op) + ": n_group must divide the number of experts, " +
                                std::to_string(args.experts) + ", it is " + std::to_string(args.groups));
    }
    int64_t const group = args.experts / args.groups;
    TRT_NVFP4_RETURN_IF_ERROR(in_range("topk_group", args.open_groups, 1, args.groups));
    TRT_NVFP4_RETURN_IF_ERROR(in_range("group_score_top", args.group_score_top, 1, group));
    TRT_NVFP4_RETURN_IF_ERROR(in_range("top_k (of the experts in open groups)", args.top_k, 1,
                                       std::min<int64_t>(TRT_NVFP4_MAX_TOP_K, args.open_groups * group)));
    return require_activation(op, args.activation, args.gated != 0);
}

inline MoePlan take_plan(Workspace& workspace, int64_t tokens, int64_t top_k, int64_t experts) {
    int64_t const pairs = tokens * top_k;
    MoePlan plan{};
    plan.experts = workspace.take<int>(pairs);
    plan.weights = workspace.take<float>(pairs);
    plan.position = workspace.take<int>(pairs);
    plan.order = workspace.take<int>(pairs);
    plan.shared_factor = workspace.take<float>(tokens);
    plan.items = workspace.take<WorkItem>(most_items(pairs, experts, kMoeFewestItemTokens));
    plan.item_count = workspace.take<int>(1);
    plan.total_cost = workspace.take<int>(1);
    return plan;
}

// Routing of `tokens` tokens from `first` on; nothing is erased.
inline RouteArgs route_args(TrtNvfp4MoeArgs const& args, MoePlan const& plan, int64_t first, int64_t tokens,
                            int item_tokens) {
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
    route.item_tokens = item_tokens;
    return route;
}

// The kernels that fill in the plan and erase. T is the activations' type.
template <typename T>
TrtNvfp4Status launch_plan(RouteArgs const& args, cudaStream_t stream);

}  // namespace trt_nvfp4
