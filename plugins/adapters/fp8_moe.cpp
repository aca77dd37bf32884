#include "moe_call.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kGateUp = kExperts,
    kDown = kGateUp + kFp8WeightPorts,
    kSharedGateUp = kDown + kFp8WeightPorts,
    kSharedDown = kSharedGateUp + kFp8WeightPorts,
    kBehindWeights = kSharedDown + kFp8WeightPorts
};

TrtNvfp4Fp8MoeArgs arguments(Call const& call) {
    TrtNvfp4Fp8MoeArgs args{};
    args.moe = moe_arguments(call);
    args.moe.intermediate = call.last(kDown);
    args.moe.shared_intermediate = call.last(kSharedDown);
    int64_t const hidden = args.moe.hidden;
    int64_t const experts = args.moe.experts;
    int64_t const factor = args.moe.gated ? 2 : 1;
    call.expect_fp8_weight(kGateUp, factor * args.moe.intermediate, hidden, {experts});
    call.expect_fp8_weight(kDown, hidden, args.moe.intermediate, {experts});
    call.expect_fp8_weight(kSharedGateUp, factor * args.moe.shared_intermediate, hidden);
    call.expect_fp8_weight(kSharedDown, hidden, args.moe.shared_intermediate);
    args.up = call.fp8_weight(kGateUp);
    args.down = call.fp8_weight(kDown);
    args.shared_up = call.fp8_weight(kSharedGateUp);
    args.shared_down = call.fp8_weight(kSharedDown);
    read_behind_weights(call, kBehindWeights, args.moe);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = inputs[kX];
}

}  // namespace

Op const& fp8_moe_op() {
    static Op const op{
        "FP8MoE",
        join({moe_ports(),
              fp8_weight_ports("gate_up"),
              fp8_weight_ports("down"),
              fp8_weight_ports("shared_gate_up"),
              fp8_weight_ports("shared_down"),
              {{"shared_gate", Role::kT}, {"input_scale", Role::kFloat}, {"hidden_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        moe_attributes(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4Fp8MoeWorkspace, trtNvfp4Fp8MoeTactics, trtNvfp4Fp8Moe>(),
    };
    return op;
}

}  // namespace trt_nvfp4
