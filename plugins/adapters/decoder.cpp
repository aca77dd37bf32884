#include "op.h"

namespace trt_nvfp4 {
namespace {

enum Input {
    kX,
    kPast,
    kPastLength,
    kCos,
    kSin,
    kAttentionNorm,
    kQueryNorm,
    kKeyNorm,
    kKeyScale,
    kValueScale,
    kQkv,
    kOutput = kQkv + kWeightPorts,
    kMlpNorm = kOutput + kWeightPorts,
    kUp,
    kDown = kUp + kWeightPorts,
};
enum Output { kY, kPresent };

TrtNvfp4DecoderArgs arguments(Call const& call) {
    call.expect_rank(kX, 3);
    call.expect_rank(kPast, 6);
    call.expect_rank(kCos, 2);
    TrtNvfp4DecoderArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(call.attributes.integer("activation"));
    args.rope = static_cast<TrtNvfp4Rope>(call.attributes.integer("rope"));
    args.fp8_cache = call.attributes.integer("fp8_cache");
    if ((call.type(kPast) == nvinfer1::DataType::kINT8) != (args.fp8_cache != 0)) {
        throw std::invalid_argument(
            "NVFP4Decoder: caches must be INT8 (E4M3 bytes) with fp8_cache 1, and x's type with fp8_cache 0");
    }
    args.wide_lengths = call.type(kPastLength) == nvinfer1::DataType::kINT64;
    args.qk_norm = call.attributes.integer("qk_norm");
    args.window = call.attributes.integer("window");
    args.epsilon = call.attributes.real("epsilon");
    args.scale = call.attributes.real("scale");
    args.softcap = call.attributes.real("softcap");
    args.alpha = call.attributes.real("alpha");
    args.limit = call.attributes.real("limit");
    args.tactic = call.tactic;
    args.batch = call.dims(kX).d[0];
    args.tokens = call.dims(kX).d[1];
    args.hidden = call.last(kX);
    args.heads = call.attributes.integer("heads");
    args.layers = call.dims(kPast).d[0];
    args.kv_heads = call.dims(kPast).d[3];
    args.capacity = call.dims(kPast).d[4];
    args.head_dim = call.dims(kPast).d[5];
    args.positions = call.dims(kCos).d[0];
    args.rotary_dim = 2 * call.last(kCos);
    args.intermediate = 2 * call.last(kDown);
    int64_t const attended = args.heads * args.head_dim;
    call.expect(kPast, {args.layers, 2, args.batch, args.kv_heads, args.capacity, args.head_dim});
    call.expect(kPastLength, {args.batch});
    call.expect(kSin, {args.positions, args.rotary_dim / 2});
    call.expect(kAttentionNorm, {args.layers, args.hidden});
    call.expect(kQueryNorm, {args.layers, args.head_dim});
    call.expect(kKeyNorm, {args.layers, args.head_dim});
    call.expect(kKeyScale, {args.layers, args.kv_heads});
    call.expect(kValueScale, {args.layers, args.kv_heads});
    call.expect_weight(kQkv, attended + 2 * args.kv_heads * args.head_dim, args.hidden, {args.layers});
    call.expect_weight(kOutput, args.hidden, attended, {args.layers});
    call.expect(kMlpNorm, {args.layers, args.hidden});
    call.expect_weight(kUp, 2 * args.intermediate, args.hidden, {args.layers});
    call.expect_weight(kDown, args.hidden, args.intermediate, {args.layers});
    args.x = call.input(kX);
    args.past = call.input(kPast);
    args.past_length = call.input(kPastLength);
    args.cos = call.float_input(kCos);
    args.sin = call.float_input(kSin);
    args.attention_norm_weight = call.input(kAttentionNorm);
    args.q_norm_weight = call.input(kQueryNorm);
    args.k_norm_weight = call.input(kKeyNorm);
    args.key_scale = call.float_input(kKeyScale);
    args.value_scale = call.float_input(kValueScale);
    args.qkv = call.weight(kQkv);
    args.output = call.weight(kOutput);
    args.mlp_norm_weight = call.input(kMlpNorm);
    args.up = call.weight(kUp);
    args.down = call.weight(kDown);
    args.y = call.output(kY);
    args.present = call.output(kPresent);
    return args;
}

void output_shapes(nvinfer1::DimsExprs const* inputs, ShapeBuilder, nvinfer1::DimsExprs* outputs) {
    outputs[kY] = inputs[kX];
    outputs[kPresent] = inputs[kPast];
}

}  // namespace

Op const& decoder_op() {
    static Op const op{
        "NVFP4Decoder",
        join({{{"x", Role::kT},
               {"past", Role::kCache},
               {"past_length", Role::kLength},
               {"cos", Role::kFloat},
               {"sin", Role::kFloat},
               {"attention_norm_weight", Role::kT},
               {"q_norm_weight", Role::kT},
               {"k_norm_weight", Role::kT},
               {"key_scale", Role::kFloat},
               {"value_scale", Role::kFloat}},
              weight_ports("qkv"),
              weight_ports("output"),
              {{"mlp_norm_weight", Role::kT}},
              weight_ports("up"),
              weight_ports("down")}),
        {{"y", Role::kT}, {"present", Role::kCache}},
        {int_attribute("heads", 1), int_attribute("rope", TRT_NVFP4_ROPE_NONE), int_attribute("qk_norm", 0),
         int_attribute("fp8_cache", 0), int_attribute("window", 0), int_attribute("activation", TRT_NVFP4_SILU),
         float_attribute("epsilon", 1e-6f), float_attribute("scale", 0.0f), float_attribute("softcap", 0.0f),
         float_attribute("alpha", 1.702f), float_attribute("limit", 7.0f)},
        output_shapes,
        kernel_calls<arguments, trtNvfp4DecoderWorkspace, trtNvfp4DecoderTactics, trtNvfp4Decoder>(),
    };
    return op;
}

}  // namespace trt_nvfp4
