// What the adapters of mixtures have in common: everything but the experts' weights.
#pragma once

#include "op.h"

namespace trt_nvfp4 {

// But for weights and the sizes that the weights have. `Moe`: the op's definition.
template <typename Moe>
TrtNvfp4MoeArgs moe_arguments(Call const& call) {
    Moe const attributes(call.attributes);
    TrtNvfp4MoeArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.scoring = static_cast<TrtNvfp4Scoring>(attributes.scoring);
    args.gated = attributes.gated;
    args.static_scales = attributes.static_scales;
    args.renormalize = attributes.renormalize;
    args.scale_input = attributes.scale_input;
    args.shared = attributes.shared;
    args.shared_gated = attributes.shared_gated;
    args.top_k = attributes.top_k;
    args.groups = attributes.n_group;
    args.open_groups = attributes.topk_group;
    args.group_score_top = attributes.group_score_top;
    args.scaling_factor = attributes.scaling_factor;
    args.alpha = attributes.alpha;
    args.limit = attributes.limit;
    args.tactic = call.tactic;
    args.m = call.rows(Moe::kX);
    args.hidden = call.last(Moe::kX);
    args.experts = call.last(Moe::kRouterLogits);
    std::vector<int64_t> logits(call.dims(Moe::kX).d, call.dims(Moe::kX).d + call.dims(Moe::kX).nbDims);
    logits.back() = args.experts;
    call.expect(Moe::kRouterLogits, logits);
    call.expect(Moe::kCorrectionBias, {args.experts});
    call.expect(Moe::kSharedGate, {args.hidden});
    args.x = call.input(Moe::kX);
    args.router_logits = call.float_input(Moe::kRouterLogits);
    args.correction_bias = call.float_input(Moe::kCorrectionBias);
    args.shared_gate = call.input(Moe::kSharedGate);
    args.y = call.output(Moe::kY);
    return args;
}

// `input` and `hidden`: the scales of activations.
inline void read_scales(Call const& call, int32_t input, int32_t hidden, TrtNvfp4MoeArgs& args) {
    call.expect_scalar(input);
    call.expect_scalar(hidden);
    args.input_tensor_scale = call.float_input(input);
    args.hidden_tensor_scale = call.float_input(hidden);
}

}  // namespace trt_nvfp4
