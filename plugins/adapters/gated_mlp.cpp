#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kGateUpWeight,
    kGateUpScales,
    kGateUpTensorScale,
    kGateUpBias,
    kDownWeight,
    kDownScales,
    kDownTensorScale,
    kDownBias,
    kInputTensorScale,
    kHiddenTensorScale
};

// One gated layer without norm and residual.
TrtNvfp4MlpArgs arguments(Call const& call) {
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.gated = 1;
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.static_scales = call.attributes.integer("static_scales");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.layers = 1;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.intermediate = call.rows(kGateUpWeight) / 2;
    args.hidden_out = call.rows(kDownWeight);
    call.expect(kGateUpWeight, {2 * args.intermediate, args.hidden_in / 2});
    call.expect(kGateUpScales, scale_dims(2 * args.intermediate, args.hidden_in));
    call.expect_scalar(kGateUpTensorScale);
    call.expect(kGateUpBias, {2 * args.intermediate});
    call.expect(kDownWeight, {args.hidden_out, args.intermediate / 2});
    call.expect(kDownScales, scale_dims(args.hidden_out, args.intermediate));
    call.expect_scalar(kDownTensorScale);
    call.expect(kDownBias, {args.hidden_out});
    call.expect_scalar(kInputTensorScale);
    call.expect_scalar(kHiddenTensorScale);
    args.x = call.input(kX);
    args.up = {call.input(kGateUpWeight), call.input(kGateUpScales), call.float_input(kGateUpTensorScale),
               call.input(kGateUpBias)};
    args.down = {call.input(kDownWeight), call.input(kDownScales), call.float_input(kDownTensorScale),
                 call.input(kDownBias)};
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDownWeight], 0, "NVFP4GatedMLP: down_weight"));
}

TrtNvfp4Status workspace(Call const& call, size_t* bytes) {
    TrtNvfp4MlpArgs const args = arguments(call);
    return trtNvfp4MlpWorkspace(&args, bytes);
}

TrtNvfp4Status run(Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    TrtNvfp4MlpArgs const args = arguments(call);
    return trtNvfp4Mlp(&args, workspace, bytes, stream);
}

}  // namespace

Op const& gated_mlp_op() {
    static Op const op{
        "NVFP4GatedMLP",
        {{"x", Role::kT},
         {"gate_up_weight", Role::kBytes},
         {"gate_up_scales", Role::kBytes},
         {"gate_up_tensor_scale", Role::kFloat},
         {"gate_up_bias", Role::kT},
         {"down_weight", Role::kBytes},
         {"down_scales", Role::kBytes},
         {"down_tensor_scale", Role::kFloat},
         {"down_bias", Role::kT},
         {"input_tensor_scale", Role::kFloat},
         {"hidden_tensor_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("quantize_activations", 0),
         int_attribute("static_scales", 0), float_attribute("alpha", 1.702f), float_attribute("limit", 7.0f)},
        output_shapes,
        workspace,
        run,
    };
    return op;
}

}  // namespace trt_nvfp4
