#include "moe_call.h"

namespace trt_nvfp4 {

std::vector<Port> moe_ports() {
    return {{"x", Role::kT}, {"router_logits", Role::kFloat}, {"correction_bias", Role::kFloat}};
}

std::vector<Attribute> moe_attributes(std::vector<Attribute> const& own) {
    std::vector<Attribute> attributes{int_attribute("top_k", 1),
                                      int_attribute("scoring", TRT_NVFP4_SOFTMAX),
                                      int_attribute("renormalize", 0),
                                      float_attribute("scaling_factor", 1.0f),
                                      int_attribute("n_group", 1),
                                      int_attribute("topk_group", 1),
                                      int_attribute("group_score_top", 1),
                                      int_attribute("scale_input", 0),
                                      int_attribute("activation", TRT_NVFP4_SILU),
                                      int_attribute("gated", 1),
                                      float_attribute("alpha", 1.702f),
                                      float_attribute("limit", 7.0f),
                                      int_attribute("shared", 0),
                                      int_attribute("shared_gated", 0)};
    attributes.insert(attributes.end(), own.begin(), own.end());
    attributes.push_back(int_attribute("static_scales", 0));
    return attributes;
}

TrtNvfp4MoeArgs moe_arguments(Call const& call) {
    TrtNvfp4MoeArgs args{};
    Attributes const& attributes = call.attributes;
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.integer("activation"));
    args.scoring = static_cast<TrtNvfp4Scoring>(attributes.integer("scoring"));
    args.gated = attributes.integer("gated");
    args.static_scales = attributes.integer("static_scales");
    args.renormalize = attributes.integer("renormalize");
    args.scale_input = attributes.integer("scale_input");
    args.shared = attributes.integer("shared");
    args.shared_gated = attributes.integer("shared_gated");
    args.top_k = attributes.integer("top_k");
    args.groups = attributes.integer("n_group");
    args.open_groups = attributes.integer("topk_group");
    args.group_score_top = attributes.integer("group_score_top");
    args.scaling_factor = attributes.real("scaling_factor");
    args.alpha = attributes.real("alpha");
    args.limit = attributes.real("limit");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.hidden = call.last(kX);
    args.experts = call.last(kRouterLogits);
    std::vector<int64_t> logits(call.dims(kX).d, call.dims(kX).d + call.dims(kX).nbDims);
    logits.back() = args.experts;
    call.expect(kRouterLogits, logits);
    call.expect(kCorrectionBias, {args.experts});
    args.x = call.input(kX);
    args.router_logits = call.float_input(kRouterLogits);
    args.correction_bias = call.float_input(kCorrectionBias);
    args.y = call.output(0);
    return args;
}

void read_behind_weights(Call const& call, int32_t first, TrtNvfp4MoeArgs& args) {
    call.expect(first, {args.hidden});
    call.expect_scalar(first + 1);
    call.expect_scalar(first + 2);
    args.shared_gate = call.input(first);
    args.input_tensor_scale = call.float_input(first + 1);
    args.hidden_tensor_scale = call.float_input(first + 2);
}

}  // namespace trt_nvfp4
