#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kNormWeight,
    kUp,
    kDown = kUp + kWeightPorts,
    kInputTensorScale = kDown + kWeightPorts,
    kHiddenTensorScale
};

TrtNvfp4MlpArgs arguments(Call const& call) {
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.gated = call.attributes.integer("gated");
    args.norm = call.attributes.integer("norm");
    args.residual = call.attributes.integer("residual");
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.scale_search = call.attributes.integer("scale_search");
    args.static_scales = call.attributes.integer("static_scales");
    args.epsilon = call.attributes.real("epsilon");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.layers = call.rows(kNormWeight);
    args.intermediate = 2 * call.last(kDown);
    args.hidden_out = args.layers > 0 ? call.rows(kDown) / args.layers : 0;
    int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
    call.expect(kNormWeight, {args.layers, args.hidden_in});
    call.expect_weight(kUp, up_rows, args.hidden_in, {args.layers});
    call.expect_weight(kDown, args.hidden_out, args.intermediate, {args.layers});
    call.expect(kInputTensorScale, {args.layers});
    call.expect(kHiddenTensorScale, {args.layers});
    args.x = call.input(kX);
    args.norm_weight = call.input(kNormWeight);
    args.up = call.weight(kUp);
    args.down = call.weight(kDown);
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDown], 1, "NVFP4PersistentMLP: down_weight"));
}

}  // namespace

Op const& persistent_mlp_op() {
    static Op const op{
        "NVFP4PersistentMLP",
        join({{{"x", Role::kT}, {"norm_weight", Role::kT}},
              weight_ports("up"),
              weight_ports("down"),
              {{"input_tensor_scale", Role::kFloat}, {"hidden_tensor_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("gated", 1), int_attribute("norm", 1),
         int_attribute("residual", 1), int_attribute("quantize_activations", 0), int_attribute("scale_search", 0),
         int_attribute("static_scales", 0), float_attribute("epsilon", 1e-6f), float_attribute("alpha", 1.702f),
         float_attribute("limit", 7.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4MlpWorkspace, trtNvfp4MlpTactics, trtNvfp4Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
