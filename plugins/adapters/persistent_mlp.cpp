#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kNormWeight,
    kUpWeight,
    kUpScales,
    kUpTensorScale,
    kUpBias,
    kDownWeight,
    kDownScales,
    kDownTensorScale,
    kDownBias,
    kInputTensorScale,
    kHiddenTensorScale
};

TrtNvfp4MlpArgs arguments(Call const& call) {
    TrtNvfp4MlpArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.gated = call.attributes.integer("gated");
    args.norm = call.attributes.integer("norm");
    args.residual = call.attributes.integer("residual");
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.static_scales = call.attributes.integer("static_scales");
    args.epsilon = call.attributes.real("epsilon");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.hidden_in = call.last(kX);
    args.layers = call.rows(kNormWeight);
    args.intermediate = 2 * call.last(kDownWeight);
    args.hidden_out = args.layers > 0 ? call.rows(kDownWeight) / args.layers : 0;
    int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
    call.expect(kNormWeight, {args.layers, args.hidden_in});
    call.expect(kUpWeight, {args.layers, up_rows, args.hidden_in / 2});
    call.expect(kUpScales, scale_dims(up_rows, args.hidden_in, {args.layers}));
    call.expect(kUpTensorScale, {args.layers});
    call.expect(kUpBias, {args.layers, up_rows});
    call.expect(kDownWeight, {args.layers, args.hidden_out, args.intermediate / 2});
    call.expect(kDownScales, scale_dims(args.hidden_out, args.intermediate, {args.layers}));
    call.expect(kDownTensorScale, {args.layers});
    call.expect(kDownBias, {args.layers, args.hidden_out});
    call.expect(kInputTensorScale, {args.layers});
    call.expect(kHiddenTensorScale, {args.layers});
    args.x = call.input(kX);
    args.norm_weight = call.input(kNormWeight);
    args.up = {call.input(kUpWeight), call.input(kUpScales), call.float_input(kUpTensorScale), call.input(kUpBias)};
    args.down = {call.input(kDownWeight), call.input(kDownScales), call.float_input(kDownTensorScale),
                 call.input(kDownBias)};
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.hidden_tensor_scale = call.float_input(kHiddenTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kDownWeight], 1, "NVFP4PersistentMLP: down_weight"));
}

TrtNvfp4Status workspace(Call const& call, size_t* bytes) {
    TrtNvfp4MlpArgs const args = arguments(call);
    return trtNvfp4MlpWorkspace(&args, bytes);
}

TrtNvfp4Status run(Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    TrtNvfp4MlpArgs const args = arguments(call);
    return trtNvfp4Mlp(&args, workspace, bytes, stream);
}

}  // namespace

Op const& persistent_mlp_op() {
    static Op const op{
        "NVFP4PersistentMLP",
        {{"x", Role::kT},
         {"norm_weight", Role::kT},
         {"up_weight", Role::kBytes},
         {"up_scales", Role::kBytes},
         {"up_tensor_scale", Role::kFloat},
         {"up_bias", Role::kT},
         {"down_weight", Role::kBytes},
         {"down_scales", Role::kBytes},
         {"down_tensor_scale", Role::kFloat},
         {"down_bias", Role::kT},
         {"input_tensor_scale", Role::kFloat},
         {"hidden_tensor_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_SILU), int_attribute("gated", 1), int_attribute("norm", 1),
         int_attribute("residual", 1), int_attribute("quantize_activations", 0), int_attribute("static_scales", 0),
         float_attribute("epsilon", 1e-6f), float_attribute("alpha", 1.702f), float_attribute("limit", 7.0f)},
        output_shapes,
        workspace,
        run,
    };
    return op;
}

}  // namespace trt_nvfp4
