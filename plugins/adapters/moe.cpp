#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kRouterLogits,
    kCorrectionBias,
    kGateUp,
    kDown = kGateUp + kWeightPorts,
    kSharedGateUp = kDown + kWeightPorts,
    kSharedDown = kSharedGateUp + kWeightPorts,
    kSharedGate = kSharedDown + kWeightPorts,
    kInputTensorScale,
    kHiddenTensorScale
};

TrtNvfp4MoeArgs arguments(Call const& call) {
    TrtNvfp4MoeArgs args{};
    Attributes const& attributes = call.attributes;
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.integer("activation"));
    args.scoring = static_cast<TrtNvfp4Scoring>(attributes.integer("scoring"));
    args.gated = attributes.integer("gated");
    args.quantize_activations = attributes.integer("quantize_activations");
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
    args.intermediate = 2 * call.last(kDown);
    args.shared_intermediate = 2 * call.last(kSharedDown);
    int64_t const factor = args.gated ? 2 : 1;
    std::vector<int64_t> logits(call.dims(kX).d, call.dims(kX).d + call.dims(kX).nbDims);
    logits.back() = args.experts;
    call.expect(kRouterLogits, logits);
    call.expect(kCorrectionBias, {args.experts});
    call.expect_weight(kGateUp, factor * args.intermediate, args.hidden, {args.experts});
    call.expect_weight(kDown, args.hidden, args.intermediate, {args.experts});
    call.expect_weight(kSharedGateUp, factor * args.shared_intermediate, args.hidden);
    call.expect_weight(kSharedDown, args.hidden, args.shared_intermediate);
    call.expect(kSharedGate, {args.hidden});
    call.expect_scalar(kInputTensorScale);
    call.expect_scalar(kHiddenTensorScale);
    args.x = call.input(kX);
    args.router_logits = call.float_input(kRouterLogits);
    args.correction_bias = call.float_input(kCorrectionBias);
    args.up = call.weight(kGateUp);
    args.down = call.weight(kDown);
    args.shared_up = call.weight(kSharedGateUp);
    args.shared_down = call.weight(kSharedDown);
    args.shared_gate = call.input(kSharedGate);
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = inputs[kX];
}

}  // namespace

Op const& moe_op() {
    static Op const op{
        "NVFP4MoE",
        join(
            {{{"x", Role::kT}, {"router_logits", Role::kFloat}, {"correction_bias", Role::kFloat}},
             weight_ports("gate_up"),
             weight_ports("down"),
             weight_ports("shared_gate_up"),
             weight_ports("shared_down"),
             {{"shared_gate", Role::kT}, {"input_tensor_scale", Role::kFloat}, {"hidden_tensor_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        {int_attribute("top_k", 1), int_attribute("scoring", TRT_NVFP4_SOFTMAX), int_attribute("renormalize", 0),
         float_attribute("scaling_factor", 1.0f), int_attribute("n_group", 1), int_attribute("topk_group", 1),
         int_attribute("group_score_top", 1), int_attribute("scale_input", 0),
         int_attribute("activation", TRT_NVFP4_SILU), int_attribute("gated", 1), float_attribute("alpha", 1.702f),
         float_attribute("limit", 7.0f), int_attribute("shared", 0), int_attribute("shared_gated", 0),
         int_attribute("quantize_activations", 0), int_attribute("static_scales", 0)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4MoeWorkspace, trtNvfp4MoeTactics, trtNvfp4Moe>(),
    };
    return op;
}

}  // namespace trt_nvfp4
