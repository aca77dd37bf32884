#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = NVFP4GatedMLP;

// One gated layer without norm and residual.
TrtNvfp4MlpArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.gated = 1;
    args.quantize_activations = attributes.quantize_activations;
    args.scale_search = attributes.scale_search;
    args.residual_channels = attributes.residual_channels;
    args.static_scales = attributes.static_scales;
    args.alpha = attributes.alpha;
    args.limit = attributes.limit;
    args.tactic = call.tactic;
    args.layers = 1;
    args.m = call.rows(Self::kX);
    args.hidden_in = call.last(Self::kX);
    args.intermediate = call.rows(Self::kGateUpWeight) / 2;
    args.hidden_out = call.rows(Self::kDownWeight);
    call.expect_weight(Self::kGateUpWeight, 2 * args.intermediate, args.hidden_in + args.residual_channels);
    call.expect_weight(Self::kDownWeight, args.hidden_out, args.intermediate + args.residual_channels);
    call.expect_scalar(Self::kInputTensorScale);
    call.expect_scalar(Self::kHiddenTensorScale);
    args.x = call.input(Self::kX);
    args.up = call.weight(Self::kGateUpWeight);
    args.down = call.weight(Self::kDownWeight);
    args.input_tensor_scale = call.float_input(Self::kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(Self::kHiddenTensorScale);
    args.y = call.output(Self::kY);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kY] = rule.with_last(Self::kX, rule.dimension(Self::kDownWeight, 0));
}

}  // namespace

template <>
Op const& adapter<NVFP4GatedMLP>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4MlpWorkspace, trtNvfp4MlpTactics, trtNvfp4Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
