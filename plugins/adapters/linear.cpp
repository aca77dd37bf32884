#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = NVFP4Linear;

TrtNvfp4LinearArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4LinearArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.quantize_activations = attributes.quantize_activations;
    args.scale_search = attributes.scale_search;
    args.residual_channels = attributes.residual_channels;
    args.static_scales = attributes.static_scales;
    args.tactic = call.tactic;
    args.m = call.rows(Self::kX);
    args.n = call.rows(Self::kWeight);
    args.k = call.last(Self::kX);
    call.expect_weight(Self::kWeight, args.n, args.k + args.residual_channels);
    call.expect_scalar(Self::kInputTensorScale);
    args.x = call.input(Self::kX);
    args.weight = call.weight(Self::kWeight);
    args.input_tensor_scale = call.float_input(Self::kInputTensorScale);
    args.y = call.output(Self::kY);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kY] = rule.with_last(Self::kX, rule.dimension(Self::kWeight, 0));
}

}  // namespace

template <>
Op const& adapter<NVFP4Linear>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4LinearWorkspace, trtNvfp4LinearTactics, trtNvfp4Linear>(),
    };
    return op;
}

}  // namespace trt_nvfp4
