#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = CausalConvWithState;

TrtNvfp4CausalConvArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    call.expect_rank(Self::kInput, 3);
    TrtNvfp4CausalConvArgs args{};
    args.dtype = call.dtype();
    args.silu = attributes.activation != 0;
    args.batch = call.dims(Self::kInput).d[0];
    args.channels = call.dims(Self::kInput).d[1];
    args.tokens = call.dims(Self::kInput).d[2];
    args.width = call.last(Self::kWeight);
    call.expect(Self::kWeight, {args.channels, 1, args.width});
    if (call.has(Self::kBias)) call.expect(Self::kBias, {args.channels});
    if (call.has(Self::kPastState)) call.expect(Self::kPastState, {args.batch, args.channels, args.width - 1});
    args.x = call.input(Self::kInput);
    args.weight = call.input(Self::kWeight);
    args.bias = call.input(Self::kBias);
    args.past_state = call.input(Self::kPastState);
    args.y = call.output(Self::kOutput);
    args.present_state = call.output(Self::kPresentState);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kOutput] = rule.shape(Self::kInput);
    outputs[Self::kPresentState] =
        rule.with_last(Self::kInput, rule.sum(rule.dimension(Self::kWeight, 2), rule.constant(-1)));
}

}  // namespace

template <>
Op const& adapter<CausalConvWithState>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4CausalConvWorkspace, trtNvfp4CausalConvTactics, trtNvfp4CausalConv>(),
    };
    return op;
}

}  // namespace trt_nvfp4
