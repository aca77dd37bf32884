#include "op.h"

namespace trt_nvfp4 {
namespace {

using Self = CachedAttention;

TrtNvfp4AttentionArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    call.expect_rank(Self::kQkv, 3);
    call.expect_rank(Self::kPastKey, 4);
    call.expect_rank(Self::kCos, 2);
    TrtNvfp4AttentionArgs args{};
    args.dtype = call.dtype();
    args.rope = static_cast<TrtNvfp4Rope>(attributes.rope);
    args.fp8_cache = attributes.fp8_cache;
    call.expect_cache(Self::kPastKey, args.fp8_cache);
    args.wide_lengths = call.type(Self::kPastLength) == nvinfer1::DataType::kINT64;
    args.qk_norm = attributes.qk_norm;
    args.has_sinks = attributes.has_sinks;
    args.window = attributes.window;
    args.epsilon = attributes.epsilon;
    args.scale = attributes.scale;
    args.softcap = attributes.softcap;
    args.tactic = call.tactic;
    args.batch = call.dims(Self::kQkv).d[0];
    args.tokens = call.dims(Self::kQkv).d[1];
    args.heads = attributes.heads;
    args.kv_heads = call.dims(Self::kPastKey).d[1];
    args.capacity = call.dims(Self::kPastKey).d[2];
    args.head_dim = call.dims(Self::kPastKey).d[3];
    args.positions = call.dims(Self::kCos).d[0];
    args.rotary_dim = 2 * call.last(Self::kCos);
    call.expect(Self::kQkv, {args.batch, args.tokens, (args.heads + 2 * args.kv_heads) * args.head_dim});
    std::vector<int64_t> const cache{args.batch, args.kv_heads, args.capacity, args.head_dim};
    call.expect(Self::kPastKey, cache);
    call.expect(Self::kPastValue, cache);
    call.expect(Self::kPastLength, {args.batch});
    call.expect(Self::kSin, {args.positions, args.rotary_dim / 2});
    call.expect(Self::kQNormWeight, {args.head_dim});
    call.expect(Self::kKNormWeight, {args.head_dim});
    call.expect(Self::kSinks, {args.heads});
    call.expect(Self::kKeyScale, {args.kv_heads});
    call.expect(Self::kValueScale, {args.kv_heads});
    args.qkv = call.input(Self::kQkv);
    args.past_key = call.input(Self::kPastKey);
    args.past_value = call.input(Self::kPastValue);
    args.past_length = call.input(Self::kPastLength);
    args.cos = call.float_input(Self::kCos);
    args.sin = call.float_input(Self::kSin);
    args.q_norm_weight = call.input(Self::kQNormWeight);
    args.k_norm_weight = call.input(Self::kKNormWeight);
    args.sinks = call.float_input(Self::kSinks);
    args.key_scale = call.float_input(Self::kKeyScale);
    args.value_scale = call.float_input(Self::kValueScale);
    args.y = call.output(Self::kY);
    args.present_key = call.output(Self::kPresentKey);
    args.present_value = call.output(Self::kPresentValue);
    return args;
}

void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    // Heads are known by their norm's weight and their sinks.
    auto const head_dim = rule.dimension(Self::kQNormWeight, 0);
    auto const heads = rule.dimension(Self::kSinks, 0);
    outputs[Self::kY] = rule.with_last(Self::kQkv, rule.product(heads, head_dim));
    outputs[Self::kPresentKey] = rule.shape(Self::kPastKey);
    outputs[Self::kPresentValue] = rule.shape(Self::kPastValue);
}

}  // namespace

template <>
Op const& adapter<CachedAttention>() {
    static Op const op{
        Self::definition(),
        output_shapes,
        kernel_calls<arguments, trtNvfp4AttentionWorkspace, trtNvfp4AttentionTactics, trtNvfp4Attention>(),
    };
    return op;
}

}  // namespace trt_nvfp4
