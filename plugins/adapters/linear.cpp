#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input { kX, kWeight, kWeightScales, kWeightTensorScale, kBias, kInputTensorScale };

TrtNvfp4LinearArgs arguments(Call const& call) {
    TrtNvfp4LinearArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.quantize_activations = call.attributes.integer("quantize_activations");
    args.static_scales = call.attributes.integer("static_scales");
    args.tactic = call.tactic;
    args.m = call.rows(kX);
    args.n = call.rows(kWeight);
    args.k = call.last(kX);
    call.expect(kWeight, {args.n, args.k / 2});
    call.expect(kWeightScales, scale_dims(args.n, args.k));
    call.expect_scalar(kWeightTensorScale);
    call.expect(kBias, {args.n});
    call.expect_scalar(kInputTensorScale);
    args.x = call.input(kX);
    args.weight = {call.input(kWeight), call.input(kWeightScales), call.float_input(kWeightTensorScale),
                   call.input(kBias)};
    args.input_tensor_scale = call.float_input(kInputTensorScale);
    args.y = call.output(0);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[0] = with_last(inputs[kX], dimension(inputs[kWeight], 0, "NVFP4Linear: weight"));
}

TrtNvfp4Status workspace(Call const& call, size_t* bytes) {
    TrtNvfp4LinearArgs const args = arguments(call);
    return trtNvfp4LinearWorkspace(&args, bytes);
}

TrtNvfp4Status run(Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    TrtNvfp4LinearArgs const args = arguments(call);
    return trtNvfp4Linear(&args, workspace, bytes, stream);
}

}  // namespace

Op const& linear_op() {
    static Op const op{
        "NVFP4Linear",
        {{"x", Role::kT},
         {"weight", Role::kBytes},
         {"weight_scales", Role::kBytes},
         {"weight_tensor_scale", Role::kFloat},
         {"bias", Role::kT},
         {"input_tensor_scale", Role::kFloat}},
        {{"y", Role::kT}},
        {int_attribute("activation", TRT_NVFP4_IDENTITY), int_attribute("quantize_activations", 0),
         int_attribute("static_scales", 0)},
        output_shapes,
        workspace,
        run,
    };
    return op;
}

}  // namespace trt_nvfp4
