#include "moe_call.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kGateUp = kExperts,
    kDown = kGateUp + kWeightPorts,
    kSharedGateUp = kDown + kWeightPorts,
    kSharedDown = kSharedGateUp + kWeightPorts,
    kBehindWeights = kSharedDown + kWeightPorts
};

TrtNvfp4MoeArgs arguments(Call const& call) {
    TrtNvfp4MoeArgs args = moe_arguments(call);
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.scale_search = call.attributes.integer("scale_search");
    args.intermediate = 2 * call.last(kDown);
    args.shared_intermediate = 2 * call.last(kSharedDown);
    int64_t const factor = args.gated ? 2 : 1;
    call.expect_weight(kGateUp, factor * args.intermediate, args.hidden, {args.experts});
    call.expect_weight(kDown, args.hidden, args.intermediate, {args.experts});
    call.expect_weight(kSharedGateUp, factor * args.shared_intermediate, args.hidden);
    call.expect_weight(kSharedDown, args.hidden, args.shared_intermediate);
    args.up = call.weight(kGateUp);
    args.down = call.weight(kDown);
    args.shared_up = call.weight(kSharedGateUp);
    args.shared_down = call.weight(kSharedDown);
    read_behind_weights(call, kBehindWeights, args);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = inputs[kX];
}

}  // namespace

Op const& moe_op() {
    static Op const op{
        "NVFP4MoE",
        join(
            {moe_ports(),
             weight_ports("gate_up"),
             weight_ports("down"),
             weight_ports("shared_gate_up"),
             weight_ports("shared_down"),
             {{"shared_gate", Role::kT}, {"input_tensor_scale", Role::kFloat}, {"hidden_tensor_scale", Role::kFloat}}}),
        {{"y", Role::kT}},
        moe_attributes({int_attribute("quantize_activations", 0), int_attribute("scale_search", 0)}),
        output_shapes,
        kernel_calls<arguments, trtNvfp4MoeWorkspace, trtNvfp4MoeTactics, trtNvfp4Moe>(),
    };
    return op;
}

}  // namespace trt_nvfp4
