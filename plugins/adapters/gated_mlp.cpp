#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kGateUp,
    kDown = kGateUp + kWeightPorts,
    kInputTensorScale = kDown + kWeightPorts,
    kHiddenTensorScale
};

// One gated layer without norm and residual.
TrtNvfp4MlpArgs arguments(Call const& call) {
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.gated = 1;
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.scale_search = call.attributes.integer("scale_search");
    args.static_scales = call.attributes.integer("static_scales");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.layers = 1;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.intermediate = call.rows(kGateUp) / 2;
    args.hidden_out = call.rows(kDown);
    call.expect_weight(kGateUp, 2 * args.intermediate, args.hidden_in);
    call.expect_weight(kDown, args.hidden_out, args.intermediate);
    call.expect_scalar(kInputTensorScale);
    call.expect_scalar(kHiddenTensorScale);
    args.x = call.input(kX);
    args.up = call.weight(kGateUp);
    args.down = call.weight(kDown);
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDown], 0, "NVFP4GatedMLP: down_weight"));
}

}  // namespace

Op const& gated_mlp_op() {
    static Op const op{
        "NVFP4GatedMLP",
        join({{{"x", Role::kT}},
              weight_ports("gate_up"),
              weight_ports("down"),
              {{"input_tensor_scale", Role::kFloat}, {"hidden_tensor_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("quantize_activations", 0),
         int_attribute("scale_search", 0), int_attribute("static_scales", 0), float_attribute("alpha", 1.702f),
         float_attribute("limit", 7.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4MlpWorkspace, trtNvfp4MlpTactics, trtNvfp4Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
