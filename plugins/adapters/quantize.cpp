#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = NVFP4Quantize;

TrtNvfp4QuantizeArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    TrtNvfp4QuantizeArgs args{};
    args.dtype = call.dtype();
    args.norm = attributes.norm;
    args.add_residual = attributes.add_residual;
    args.epsilon = attributes.epsilon;
    args.scale_search = attributes.scale_search;
    args.residual_channels = attributes.residual_channels;
    args.m = call.rows(Self::kX);
    args.k = call.last(Self::kX);
    call.expect(Self::kResidual,
                std::vector<int64_t>(call.dims(Self::kX).d, call.dims(Self::kX).d + call.dims(Self::kX).nbDims));
    call.expect(Self::kNormWeight, {args.k});
    call.expect_scalar(Self::kTensorScale);
    args.x = call.input(Self::kX);
    args.residual = call.input(Self::kResidual);
    args.norm_weight = call.input(Self::kNormWeight);
    args.tensor_scale = call.float_input(Self::kTensorScale);
    args.packed = call.output(Self::kPacked);
    args.block_scales = call.output(Self::kBlockScales);
    args.tensor_scale_out = static_cast<float*>(call.output(Self::kTensorScaleOut));
    args.residual_out = call.output(Self::kResidualOut);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    nvinfer1::DimsExprs const& x = rule.shape(Self::kX);
    int32_t const more = Self(rule.attributes).residual_channels;
    ShapeRule::Dim const k = rule.sum(x.d[x.nbDims - 1], rule.constant(more));
    ShapeRule::Dim rows = rule.constant(1);
    for (int32_t i = 0; i + 1 < x.nbDims; ++i) rows = rule.product(rows, x.d[i]);
    outputs[Self::kPacked] = rule.with_last(Self::kX, rule.quotient(k, 2));
    outputs[Self::kBlockScales] = {2, {rule.round_up(rows, 128), rule.round_up(rule.quotient(k, 16), 4)}};
    outputs[Self::kTensorScaleOut] = {0, {}};
    outputs[Self::kResidualOut] = x;
}

}  // namespace

template <>
Op const& adapter<NVFP4Quantize>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4QuantizeWorkspace, trtNvfp4QuantizeTactics, trtNvfp4Quantize>(),
    };
    return op;
}

}  // namespace trt_nvfp4
