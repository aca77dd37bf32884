#include "moe_call.h"

namespace trt_nvfp4 {
namespace {

using Self = FP8MoE;

TrtNvfp4Fp8MoeArgs arguments(Call const& call) {
    TrtNvfp4Fp8MoeArgs args{};
    args.moe = moe_arguments<Self>(call);
    args.moe.intermediate = call.last(Self::kDownWeight);
    args.moe.shared_intermediate = call.last(Self::kSharedDownWeight);
    int64_t const hidden = args.moe.hidden;
    int64_t const experts = args.moe.experts;
    int64_t const factor = args.moe.gated ? 2 : 1;
    call.expect_fp8_weight(Self::kGateUpWeight, factor * args.moe.intermediate, hidden, {experts});
    call.expect_fp8_weight(Self::kDownWeight, hidden, args.moe.intermediate, {experts});
    call.expect_fp8_weight(Self::kSharedGateUpWeight, factor * args.moe.shared_intermediate, hidden);
    call.expect_fp8_weight(Self::kSharedDownWeight, hidden, args.moe.shared_intermediate);
    args.up = call.fp8_weight(Self::kGateUpWeight);
    args.down = call.fp8_weight(Self::kDownWeight);
    args.shared_up = call.fp8_weight(Self::kSharedGateUpWeight);
    args.shared_down = call.fp8_weight(Self::kSharedDownWeight);
    read_scales(call, Self::kInputScale, Self::kHiddenScale, args.moe);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) { outputs[Self::kY] = rule.shape(Self::kX); }

}  // namespace

template <>
Op const& adapter<FP8MoE>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4Fp8MoeWorkspace, trtNvfp4Fp8MoeTactics, trtNvfp4Fp8Moe>(),
    };
    return op;
}

}  // namespace trt_nvfp4
