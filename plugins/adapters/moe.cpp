#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kRouterLogits,
    kCorrectionBias,
    kGateUpWeight,
    kGateUpScales,
    kGateUpTensorScale,
    kGateUpBias,
    kDownWeight,
    kDownScales,
    kDownTensorScale,
    kDownBias,
    kSharedGateUpWeight,
    kSharedGateUpScales,
    kSharedGateUpTensorScale,
    kSharedGateUpBias,
    kSharedDownWeight,
    kSharedDownScales,
    kSharedDownTensorScale,
    kSharedDownBias,
    kSharedGate,
    kInputTensorScale,
    kHiddenTensorScale
};

// Weight, scales, tensor scale and bias, in this order from `first` on.
TrtNvfp4Weight weight(Call const& call, int32_t first) {
    return {call.input(first), call.input(first + 1), call.float_input(first + 2), call.input(first + 3)};
}

// The same four's shapes, of [rows, k] behind `experts`, if given.
void expect_weight(Call const& call, int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& experts) {
    auto const behind_experts = [&](std::vector<int64_t> dims) {
        dims.insert(dims.begin(), experts.begin(), experts.end());
        return dims;
    };
    call.expect(first, behind_experts({rows, k / 2}));
    call.expect(first + 1, scale_dims(rows, k, experts));
    if (experts.empty()) {
        call.expect_scalar(first + 2);
    } else {
        call.expect(first + 2, experts);
    }
    call.expect(first + 3, behind_experts({rows}));
}

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
    args.intermediate = 2 * call.last(kDownWeight);
    args.shared_intermediate = 2 * call.last(kSharedDownWeight);
    int64_t const factor = args.gated ? 2 : 1;
    std::vector<int64_t> logits(call.dims(kX).d, call.dims(kX).d + call.dims(kX).nbDims);
    logits.back() = args.experts;
    call.expect(kRouterLogits, logits);
    call.expect(kCorrectionBias, {args.experts});
    expect_weight(call, kGateUpWeight, factor * args.intermediate, args.hidden, {args.experts});
    expect_weight(call, kDownWeight, args.hidden, args.intermediate, {args.experts});
    expect_weight(call, kSharedGateUpWeight, factor * args.shared_intermediate, args.hidden, {});
    expect_weight(call, kSharedDownWeight, args.hidden, args.shared_intermediate, {});
    call.expect(kSharedGate, {args.hidden});
    call.expect_scalar(kInputTensorScale);
    call.expect_scalar(kHiddenTensorScale);
    args.x = call.input(kX);
    args.router_logits = call.float_input(kRouterLogits);
    args.correction_bias = call.float_input(kCorrectionBias);
    args.up = weight(call, kGateUpWeight);
    args.down = weight(call, kDownWeight);
    args.shared_up = weight(call, kSharedGateUpWeight);
    args.shared_down = weight(call, kSharedDownWeight);
    args.shared_gate = call.input(kSharedGate);
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = inputs[kX];
}

TrtNvfp4Status workspace(Call const& call, size_t* bytes) {
    TrtNvfp4MoeArgs const args = arguments(call);
    return trtNvfp4MoeWorkspace(&args, bytes);
}

TrtNvfp4Status run(Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    TrtNvfp4MoeArgs const args = arguments(call);
    return trtNvfp4Moe(&args, workspace, bytes, stream);
}

}  // namespace

Op const& moe_op() {
    static Op const op{
        "NVFP4MoE",
        {{"x", Role::kT},
         {"router_logits", Role::kFloat},
         {"correction_bias", Role::kFloat},
         {"gate_up_weight", Role::kBytes},
         {"gate_up_scales", Role::kBytes},
         {"gate_up_tensor_scale", Role::kFloat},
         {"gate_up_bias", Role::kT},
         {"down_weight", Role::kBytes},
         {"down_scales", Role::kBytes},
         {"down_tensor_scale", Role::kFloat},
         {"down_bias", Role::kT},
         {"shared_gate_up_weight", Role::kBytes},
         {"shared_gate_up_scales", Role::kBytes},
         {"shared_gate_up_tensor_scale", Role::kFloat},
         {"shared_gate_up_bias", Role::kT},
         {"shared_down_weight", Role::kBytes},
         {"shared_down_scales", Role::kBytes},
         {"shared_down_tensor_scale", Role::kFloat},
         {"shared_down_bias", Role::kT},
         {"shared_gate", Role::kT},
         {"input_tensor_scale", Role::kFloat},
         {"hidden_tensor_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("top_k", 1), int_attribute("scoring", TRT_NVFP4_SOFTMAX), int_attribute("renormalize", 0),
         float_attribute("scaling_factor", 1.0f), int_attribute("n_group", 1), int_attribute("topk_group", 1),
         int_attribute("group_score_top", 1), int_attribute("scale_input", 0),
         int_attribute("activation", TRT_NVFP4_SILU), int_attribute("gated", 1), float_attribute("alpha", 1.702f),
         float_attribute("limit", 7.0f), int_attribute("shared", 0), int_attribute("shared_gated", 0),
         int_attribute("quantize_activations", 0), int_attribute("static_scales", 0)},
        output_shapes,
        workspace,
        run,
    };
    return op;
}

}  // namespace trt_nvfp4
