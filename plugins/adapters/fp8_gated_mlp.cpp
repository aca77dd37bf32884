#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input { kX, kGateUp, kDown = kGateUp + kFp8WeightPorts, kInputScale = kDown + kFp8WeightPorts, kHiddenScale };

TrtNvfp4Fp8MlpArgs arguments(Call const& call) {
    TrtNvfp4Fp8MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.static_scales = call.attributes.integer("static_scales");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.intermediate = call.rows(kGateUp) / 2;
    args.hidden_out = call.rows(kDown);
    call.expect_fp8_weight(kGateUp, 2 * args.intermediate, args.hidden_in);
    call.expect_fp8_weight(kDown, args.hidden_out, args.intermediate);
    call.expect_scalar(kInputScale);
    call.expect_scalar(kHiddenScale);
    args.x = call.input(kX);
    args.up = call.fp8_weight(kGateUp);
    args.down = call.fp8_weight(kDown);
    args.input_scale = call.float_input(kInputScale);
    args.hidden_scale = call.float_input(kHiddenScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDown], 0, "FP8GatedMLP: down_weight"));
}

}  // namespace

Op const& fp8_gated_mlp_op() {
    static Op const op{
        "FP8GatedMLP",
        join({{{"x", Role::kT}},
              fp8_weight_ports("gate_up"),
              fp8_weight_ports("down"),
              {{"input_scale", Role::kFloat}, {"hidden_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("static_scales", 0),
         float_attribute("alpha", 1.702f), float_attribute("limit", 7.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4Fp8MlpWorkspace, trtNvfp4Fp8MlpTactics, trtNvfp4Fp8Mlp>(),
    };
    return op;
}

}  // namespace trt_nvfp4
