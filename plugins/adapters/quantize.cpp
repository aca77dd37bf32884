#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input { kX, kResidual, kNormWeight, kTensorScale };
enum Output { kPackedOut, kBlockScalesOut, kTensorScaleOut, kResidualOut };

TrtNvfp4QuantizeArgs arguments(Call const& call) {
    TrtNvfp4QuantizeArgs args{};
    args.dtype = call.dtype();
    args.norm = call.attributes.integer("norm");
    args.add_residual = call.attributes.integer("add_residual");
    args.epsilon = call.attributes.real("epsilon");
    args.scale_search = call.attributes.integer("scale_search");
    args.m = call.rows(kX);
    args.k = call.last(kX);
    call.expect(kResidual, std::vector<int64_t>(call.dims(kX).d, call.dims(kX).d + call.dims(kX).nbDims));
    call.expect(kNormWeight, {args.k});
    call.expect_scalar(kTensorScale);
    args.x = call.input(kX);
    args.residual = call.input(kResidual);
    args.norm_weight = call.input(kNormWeight);
    args.tensor_scale = call.float_input(kTensorScale);
    args.packed = call.output(kPackedOut);
    args.block_scales = call.output(kBlockScalesOut);
    args.tensor_scale_out = static_cast<float*>(call.output(kTensorScaleOut));
    args.residual_out = call.output(kResidualOut);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder shapes, nvinfer1::DimsExprs* outputs) {
    nvinfer1::DimsExprs const& x = inputs[kX];
    ShapeBuilder::Dim const k = x.d[x.nbDims - 1];
    ShapeBuilder::Dim rows = shapes.constant(1);
    for (int32_t i = 0; i + 1 < x.nbDims; ++i) rows = shapes.product(rows, x.d[i]);
    outputs[kPackedOut] = with_last(x, shapes.quotient(k, 2));
    outputs[kBlockScalesOut] = {2, {shapes.round_up(rows, 128), shapes.round_up(shapes.quotient(k, 16), 4)}};
    outputs[kTensorScaleOut] = {0, {}};
    outputs[kResidualOut] = x;
}

}  // namespace

Op const& quantize_op() {
    static Op const op{
        "NVFP4Quantize",
        {{"x", Role::kT}, {"residual", Role::kT}, {"norm_weight", Role::kT}, {"tensor_scale", Role::kFloat}},
        {{"packed", Role::kBytes},
         {"block_scales", Role::kBytes},
         {"tensor_scale_out", Role::kFloat},
         {"residual_out", Role::kT}},
        {int_attribute("norm", 0), int_attribute("add_residual", 0), float_attribute("epsilon", 1e-6f),
         int_attribute("scale_search", 0)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4QuantizeWorkspace, trtNvfp4QuantizeTactics, trtNvfp4Quantize>(),
    };
    return op;
}

}  // namespace trt_nvfp4
