#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kGateUpWeight,
    kGateUpScale,
    kGateUpBias,
    kDownWeight,
    kDownScale,
    kDownBias,
    kInputScale,
    kHiddenScale
};

TrtNvfp4Fp8MlpArgs arguments(Call const& call) {
    TrtNvfp4Fp8MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.static_scales = call.attributes.integer("static_scales");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.intermediate = call.rows(kGateUpWeight) / 2;
    args.hidden_out = call.rows(kDownWeight);
    call.expect(kGateUpWeight, {2 * args.intermediate, args.hidden_in});
    call.expect(kGateUpScale, {2 * args.intermediate});
    call.expect(kGateUpBias, {2 * args.intermediate});
    call.expect(kDownWeight, {args.hidden_out, args.intermediate});
    call.expect(kDownScale, {args.hidden_out});
    call.expect(kDownBias, {args.hidden_out});
    call.expect_scalar(kInputScale);
    call.expect_scalar(kHiddenScale);
    args.x = call.input(kX);
    args.up = {call.input(kGateUpWeight), call.float_input(kGateUpScale), call.input(kGateUpBias)};
    args.down = {call.input(kDownWeight), call.float_input(kDownScale), call.input(kDownBias)};
    args.input_scale = call.float_input(kInputScale);
    args.hidden_scale = call.float_input(kHiddenScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDownWeight], 0, "FP8GatedMLP: down_weight"));
}

}  // namespace

Op const& fp8_gated_mlp_op() {
    static Op const op{
        "FP8GatedMLP",
        {{"x", Role::kT},
         {"gate_up_weight", Role::kBytes},
         {"gate_up_scale", Role::kFloat},
         {"gate_up_bias", Role::kT},
         {"down_weight", Role::kBytes},
         {"down_scale", Role::kFloat},
         {"down_bias", Role::kT},
         {"input_scale", Role::kFloat},
         {"hidden_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("static_scales", 0),
         float_attribute("alpha", 1.702f), float_attribute("limit", 7.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4Fp8MlpWorkspace, trtNvfp4Fp8MlpTactics, trtNvfp4Fp8Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
