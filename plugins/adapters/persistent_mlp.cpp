#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = NVFP4PersistentMLP;

TrtNvfp4MlpArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.gated = attributes.gated;
    args.norm = attributes.norm;
    args.residual = attributes.residual;
    args.quantize_activations = attributes.quantize_activations;
    args.scale_search = attributes.scale_search;
    args.residual_channels = attributes.residual_channels;
    args.static_scales = attributes.static_scales;
    args.epsilon = attributes.epsilon;
    args.alpha = attributes.alpha;
    args.limit = attributes.limit;
    args.tactic = call.tactic;
    args.m = call.rows(Self::kX);
    args.hidden_in = call.last(Self::kX);
    args.layers = call.rows(Self::kNormWeight);
    args.intermediate = 2 * call.last(Self::kDownWeight) - args.residual_channels;
    args.hidden_out = args.layers > 0 ? call.rows(Self::kDownWeight) / args.layers : 0;
    int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
    call.expect(Self::kNormWeight, {args.layers, args.hidden_in});
    call.expect_weight(Self::kUpWeight, up_rows, args.hidden_in + args.residual_channels, {args.layers});
    call.expect_weight(Self::kDownWeight, args.hidden_out, args.intermediate + args.residual_channels, {args.layers});
    call.expect(Self::kInputTensorScale, {args.layers});
    call.expect(Self::kHiddenTensorScale, {args.layers});
    args.x = call.input(Self::kX);
    args.norm_weight = call.input(Self::kNormWeight);
    args.up = call.weight(Self::kUpWeight);
    args.down = call.weight(Self::kDownWeight);
    args.input_tensor_scale = call.float_input(Self::kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(Self::kHiddenTensorScale);
    args.y = call.output(Self::kY);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kY] = rule.with_last(Self::kX, rule.dimension(Self::kDownWeight, 1));
}

}  // namespace

template <>
Op const& adapter<NVFP4PersistentMLP>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4MlpWorkspace, trtNvfp4MlpTactics, trtNvfp4Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
