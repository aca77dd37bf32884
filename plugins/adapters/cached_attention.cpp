#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kQkv,
    kPastKey,
    kPastValue,
    kPastLength,
    kCos,
    kSin,
    kQueryNorm,
    kKeyNorm,
    kSinks,
    kKeyScale,
    kValueScale
};
enum Output { kY, kPresentKey, kPresentValue };

TrtNvfp4AttentionArgs arguments(Call const& call) {
    call.expect_rank(kQkv, 3);
    call.expect_rank(kPastKey, 4);
    call.expect_rank(kCos, 2);
    TrtNvfp4AttentionArgs args{};
    args.dtype = call.dtype();
    args.rope = static_cast<TrtNvfp4Rope>(call.attributes.integer("rope"));
    args.fp8_cache = call.attributes.integer("fp8_cache");
    if ((call.type(kPastKey) == nvinfer1::DataType::kINT8) != (args.fp8_cache != 0)) {
        throw std::invalid_argument(
            "CachedAttention: caches must be INT8 (E4M3 bytes) with fp8_cache 1, and qkv's type with fp8_cache 0");
    }
    args.wide_lengths = call.type(kPastLength) == nvinfer1::DataType::kINT64;
    args.qk_norm = call.attributes.integer("qk_norm");
    args.has_sinks = call.attributes.integer("has_sinks");
    args.window = call.attributes.integer("window");
    args.epsilon = call.attributes.real("epsilon");
    args.scale = call.attributes.real("scale");
    args.softcap = call.attributes.real("softcap");
    args.tactic = call.tactic;
    args.batch = call.dims(kQkv).d[0];
    args.tokens = call.dims(kQkv).d[1];
    args.heads = call.attributes.integer("heads");
    args.kv_heads = call.dims(kPastKey).d[1];
    args.capacity = call.dims(kPastKey).d[2];
    args.head_dim = call.dims(kPastKey).d[3];
    args.positions = call.dims(kCos).d[0];
    args.rotary_dim = 2 * call.last(kCos);
    call.expect(kQkv, {args.batch, args.tokens, (args.heads + 2 * args.kv_heads) * args.head_dim});
    std::vector<int64_t> const cache{args.batch, args.kv_heads, args.capacity, args.head_dim};
    call.expect(kPastKey, cache);
    call.expect(kPastValue, cache);
    call.expect(kPastLength, {args.batch});
    call.expect(kSin, {args.positions, args.rotary_dim / 2});
    call.expect(kQueryNorm, {args.head_dim});
    call.expect(kKeyNorm, {args.head_dim});
    call.expect(kSinks, {args.heads});
    call.expect(kKeyScale, {args.kv_heads});
    call.expect(kValueScale, {args.kv_heads});
    args.qkv = call.input(kQkv);
    args.past_key = call.input(kPastKey);
    args.past_value = call.input(kPastValue);
    args.past_length = call.input(kPastLength);
    args.cos = call.float_input(kCos);
    args.sin = call.float_input(kSin);
    args.q_norm_weight = call.input(kQueryNorm);
    args.k_norm_weight = call.input(kKeyNorm);
    args.sinks = call.float_input(kSinks);
    args.key_scale = call.float_input(kKeyScale);
    args.value_scale = call.float_input(kValueScale);
    args.y = call.output(kY);
    args.present_key = call.output(kPresentKey);
    args.present_value = call.output(kPresentValue);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder shapes, nvinfer1::DimsExprs* outputs) {
    // Heads are known by their norm's weight and their sinks.
    auto const head_dim = dimension(inputs[kQueryNorm], 0, "CachedAttention: q_norm_weight");
    auto const heads = dimension(inputs[kSinks], 0, "CachedAttention: sinks");
    outputs[kY] = with_last(inputs[kQkv], shapes.product(heads, head_dim));
    outputs[kPresentKey] = inputs[kPastKey];
    outputs[kPresentValue] = inputs[kPastValue];
}

}  // namespace

Op const& cached_attention_op() {
    static Op const op{
        "CachedAttention",
        {{"qkv", Role::kT},
         {"past_key", Role::kCache},
         {"past_value", Role::kCache},
         {"past_length", Role::kLength},
         {"cos", Role::kFloat},
         {"sin", Role::kFloat},
         {"q_norm_weight", Role::kT},
         {"k_norm_weight", Role::kT},
         {"sinks", Role::kFloat},
         {"key_scale", Role::kFloat},
         {"value_scale", Role::kFloat}},
        {{"y", Role::kT}, {"present_key", Role::kCache}, {"present_value", Role::kCache}},
        {int_attribute("heads", 1), int_attribute("rope", TRT_NVFP4_ROPE_NONE), int_attribute("qk_norm", 0),
         int_attribute("has_sinks", 0), int_attribute("fp8_cache", 0), int_attribute("window", 0),
         float_attribute("epsilon", 1e-6f), float_attribute("scale", 0.0f), float_attribute("softcap", 0.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4AttentionWorkspace, trtNvfp4AttentionTactics, trtNvfp4Attention>(),
    };
    return op;
}

}  // namespace trt_nvfp4
