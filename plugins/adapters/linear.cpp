#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input { kX, kWeight, kInputTensorScale = kWeight + kWeightPorts };

TrtNvfp4LinearArgs arguments(Call const& call) {
    TrtNvfp4LinearArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.scale_search = call.attributes.integer("scale_search");
    args.static_scales = call.attributes.integer("static_scales");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.n = call.rows(kWeight);
    args.k = call.last(kX);
    call.expect_weight(kWeight, args.n, args.k);
    call.expect_scalar(kInputTensorScale);
    args.x = call.input(kX);
    args.weight = call.weight(kWeight);
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kWeight], 0, "NVFP4Linear: weight"));
}

}  // namespace

Op const& linear_op() {
    static Op const op{
        "NVFP4Linear",
        {{"x", Role::kT},
         {"weight", Role::kBytes},
         {"weight_scales", Role::kBytes},
         {"weight_tensor_scale", Role::kFloat},
         {"bias", Role::kT},
         {"input_tensor_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_IDENTITY), int_attribute("quantize_activations", 0),
         int_attribute("scale_search", 0), int_attribute("static_scales", 0)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4LinearWorkspace, trtNvfp4LinearTactics, trtNvfp4Linear>(),
    };
    return op;
}

}  // namespace trt_nvfp4
