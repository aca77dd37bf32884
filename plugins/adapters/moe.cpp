#include "moe_call.h"

namespace trt_nvfp4 {
namespace {

using Self = NVFP4MoE;

TrtNvfp4MoeArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4MoeArgs args = moe_arguments<Self>(call);
    args.quantize_activations = attributes.quantize_activations;
    args.scale_search = attributes.scale_search;
    args.residual_channels = attributes.residual_channels;
    int64_t const more = args.residual_channels;
    args.intermediate = 2 * call.last(Self::kDownWeight) - more;
    args.shared_intermediate = 2 * call.last(Self::kSharedDownWeight) - more;
    int64_t const factor = args.gated ? 2 : 1;
    call.expect_weight(Self::kGateUpWeight, factor * args.intermediate, args.hidden + more, {args.experts});
    call.expect_weight(Self::kDownWeight, args.hidden, args.intermediate + more, {args.experts});
    call.expect_weight(Self::kSharedGateUpWeight, factor * args.shared_intermediate, args.hidden + more);
    call.expect_weight(Self::kSharedDownWeight, args.hidden, args.shared_intermediate + more);
    args.up = call.weight(Self::kGateUpWeight);
    args.down = call.weight(Self::kDownWeight);
    args.shared_up = call.weight(Self::kSharedGateUpWeight);
    args.shared_down = call.weight(Self::kSharedDownWeight);
    read_scales(call, Self::kInputTensorScale, Self::kHiddenTensorScale, args);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) { outputs[Self::kY] = rule.shape(Self::kX); }

}  // namespace

template <>
Op const& adapter<NVFP4MoE>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4MoeWorkspace, trtNvfp4MoeTactics, trtNvfp4Moe>(),
    };
    return op;
}

}  // namespace trt_nvfp4
