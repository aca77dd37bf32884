#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = LinearAttention;

TrtNvfp4LinearAttentionArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    for (int32_t input : {Self::kQuery, Self::kKey, Self::kValue}) call.expect_rank(input, 3);
    TrtNvfp4LinearAttentionArgs args{};
    args.dtype = call.dtype();
    args.state_dtype = call.has(Self::kPastState) ? call.dtype(Self::kPastState) : args.dtype;
    args.rule = static_cast<TrtNvfp4UpdateRule>(attributes.update_rule);
    args.scale = attributes.scale;
    args.tactic = call.tactic;
    args.batch = call.dims(Self::kQuery).d[0];
    args.tokens = call.dims(Self::kQuery).d[1];
    args.heads = attributes.q_num_heads;
    args.kv_heads = attributes.kv_num_heads;
    args.key_dim = call.last(Self::kKey) / args.kv_heads;
    args.value_dim = call.last(Self::kValue) / args.kv_heads;
    call.expect(Self::kQuery, {args.batch, args.tokens, args.heads * args.key_dim});
    call.expect(Self::kKey, {args.batch, args.tokens, args.kv_heads * args.key_dim});
    call.expect(Self::kValue, {args.batch, args.tokens, args.kv_heads * args.value_dim});
    if (call.has(Self::kPastState)) {
        call.expect(Self::kPastState, {args.batch, args.kv_heads, args.key_dim, args.value_dim});
    }
    // Rules without a decay or a beta do not read what takes its place.
    if (call.has(Self::kDecay) && (args.rule & TRT_NVFP4_RULE_GATED) != 0) {
        call.expect_rank(Self::kDecay, 3);
        args.decay_dim = call.last(Self::kDecay) == args.kv_heads ? 1 : args.key_dim;
        call.expect(Self::kDecay, {args.batch, args.tokens, args.kv_heads * args.decay_dim});
        args.decay = call.input(Self::kDecay);
    }
    if (call.has(Self::kBeta) && (args.rule & TRT_NVFP4_RULE_DELTA) != 0) {
        call.expect_rank(Self::kBeta, 3);
        args.beta_heads = call.last(Self::kBeta) == 1 ? 1 : args.kv_heads;
        call.expect(Self::kBeta, {args.batch, args.tokens, args.beta_heads});
        args.beta = call.input(Self::kBeta);
    }
    args.query = call.input(Self::kQuery);
    args.key = call.input(Self::kKey);
    args.value = call.input(Self::kValue);
    args.past_state = call.input(Self::kPastState);
    args.y = call.output(Self::kOutput);
    args.present_state = call.output(Self::kPresentState);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    Self const attributes(rule.attributes);
    auto const value_dim = rule.quotient(rule.dimension(Self::kValue, 2), attributes.kv_num_heads);
    outputs[Self::kOutput] =
        rule.with_last(Self::kQuery, rule.product(value_dim, rule.constant(attributes.q_num_heads)));
    nvinfer1::DimsExprs& state = outputs[Self::kPresentState];
    if (rule.input_count > Self::kPastState) {
        state = rule.shape(Self::kPastState);
        return;
    }
    state.nbDims = 4;
    state.d[0] = rule.dimension(Self::kQuery, 0);
    state.d[1] = rule.constant(attributes.kv_num_heads);
    state.d[2] = rule.quotient(rule.dimension(Self::kKey, 2), attributes.kv_num_heads);
    state.d[3] = value_dim;
}

}  // namespace

template <>
Op const& adapter<LinearAttention>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4LinearAttentionWorkspace, trtNvfp4LinearAttentionTactics,
                     trtNvfp4LinearAttention>(),
    };
    return op;
}

}  // namespace trt_nvfp4
