#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = FP8GatedMLP;

TrtNvfp4Fp8MlpArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4Fp8MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.static_scales = attributes.static_scales;
    args.alpha = attributes.alpha;
    args.limit = attributes.limit;
    args.tactic = call.tactic;
    args.m = call.rows(Self::kX);
    args.hidden_in = call.last(Self::kX);
    args.intermediate = call.rows(Self::kGateUpWeight) / 2;
    args.hidden_out = call.rows(Self::kDownWeight);
    call.expect_fp8_weight(Self::kGateUpWeight, 2 * args.intermediate, args.hidden_in);
    call.expect_fp8_weight(Self::kDownWeight, args.hidden_out, args.intermediate);
    call.expect_scalar(Self::kInputScale);
    call.expect_scalar(Self::kHiddenScale);
    args.x = call.input(Self::kX);
    args.up = call.fp8_weight(Self::kGateUpWeight);
    args.down = call.fp8_weight(Self::kDownWeight);
    args.input_scale = call.float_input(Self::kInputScale);
    args.hidden_scale = call.float_input(Self::kHiddenScale);
    args.y = call.output(Self::kY);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kY] = rule.with_last(Self::kX, rule.dimension(Self::kDownWeight, 0));
}

}  // namespace

template <>
Op const& adapter<FP8GatedMLP>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4Fp8MlpWorkspace, trtNvfp4Fp8MlpTactics, trtNvfp4Fp8Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
