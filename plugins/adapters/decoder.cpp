#include "op.h"

namespace trt_nvfp4 {
namespace {

// `Self`: NVFP4Decoder or NVFP4MoEDecoder.
template <class Self>
TrtNvfp4DecoderArgs arguments(Call const& call) {
    Self const attributes(call.attributes);
    call.expect_rank(Self::kX, 3);
    call.expect_rank(Self::kPast, 6);
    call.expect_rank(Self::kCos, 2);
    TrtNvfp4DecoderArgs args{};
    args.dtype = call.dtype();
    args.activation = static_cast<TrtNvfp4Activation>(attributes.activation);
    args.rope = static_cast<TrtNvfp4Rope>(attributes.rope);
    args.fp8_cache = attributes.fp8_cache;
    call.expect_cache(Self::kPast, args.fp8_cache);
    args.wide_lengths = call.type(Self::kPastLength) == nvinfer1::DataType::kINT64;
    args.qk_norm = attributes.qk_norm;
    args.window = attributes.window;
    args.epsilon = attributes.epsilon;
    args.scale = attributes.scale;
    args.softcap = attributes.softcap;
    args.alpha = attributes.alpha;
    args.limit = attributes.limit;
    args.tactic = call.tactic;
    args.batch = call.dims(Self::kX).d[0];
    args.tokens = call.dims(Self::kX).d[1];
    args.hidden = call.last(Self::kX);
    args.heads = attributes.heads;
    args.layers = call.dims(Self::kPast).d[0];
    args.kv_heads = call.dims(Self::kPast).d[3];
    args.capacity = call.dims(Self::kPast).d[4];
    args.head_dim = call.dims(Self::kPast).d[5];
    args.positions = call.dims(Self::kCos).d[0];
    args.rotary_dim = 2 * call.last(Self::kCos);
    args.intermediate = 2 * call.last(Self::kDownWeight);
    int64_t const attended = args.heads * args.head_dim;
    call.expect(Self::kPast, {args.layers, 2, args.batch, args.kv_heads, args.capacity, args.head_dim});
    call.expect(Self::kPastLength, {args.batch});
    call.expect(Self::kSin, {args.positions, args.rotary_dim / 2});
    call.expect(Self::kAttentionNormWeight, {args.layers, args.hidden});
    call.expect(Self::kQNormWeight, {args.layers, args.head_dim});
    call.expect(Self::kKNormWeight, {args.layers, args.head_dim});
    call.expect(Self::kKeyScale, {args.layers, args.kv_heads});
    call.expect(Self::kValueScale, {args.layers, args.kv_heads});
    call.expect_weight(Self::kQkvWeight, attended + 2 * args.kv_heads * args.head_dim, args.hidden, {args.layers});
    call.expect_weight(Self::kOutputWeight, args.hidden, attended, {args.layers});
    call.expect(Self::kMlpNormWeight, {args.layers, args.hidden});
    std::vector<int64_t> stack{args.layers};
    if constexpr (std::is_same_v<Self, NVFP4MoEDecoder>) {
        call.expect_rank(Self::kRouterWeight, 3);
        args.experts = call.dims(Self::kRouterWeight).d[1];
        // The kernels' API takes 0 experts for no mixture.
        if (args.experts < 1) throw std::invalid_argument(std::string(call.op.name) + ": router_weight has no experts");
        args.scoring = static_cast<TrtNvfp4Scoring>(attributes.scoring);
        args.top_k = attributes.top_k;
        args.renormalize = attributes.renormalize;
        args.scaling_factor = attributes.scaling_factor;
        call.expect(Self::kRouterWeight, {args.layers, args.experts, args.hidden});
        args.router_weight = call.input(Self::kRouterWeight);
        stack.push_back(args.experts);
    }
    call.expect_weight(Self::kUpWeight, 2 * args.intermediate, args.hidden, stack);
    call.expect_weight(Self::kDownWeight, args.hidden, args.intermediate, stack);
    args.x = call.input(Self::kX);
    args.past = call.input(Self::kPast);
    args.past_length = call.input(Self::kPastLength);
    args.cos = call.float_input(Self::kCos);
    args.sin = call.float_input(Self::kSin);
    args.attention_norm_weight = call.input(Self::kAttentionNormWeight);
    args.q_norm_weight = call.input(Self::kQNormWeight);
    args.k_norm_weight = call.input(Self::kKNormWeight);
    args.key_scale = call.float_input(Self::kKeyScale);
    args.value_scale = call.float_input(Self::kValueScale);
    args.qkv = call.weight(Self::kQkvWeight);
    args.output = call.weight(Self::kOutputWeight);
    args.mlp_norm_weight = call.input(Self::kMlpNormWeight);
    args.up = call.weight(Self::kUpWeight);
    args.down = call.weight(Self::kDownWeight);
    args.y = call.output(Self::kY);
    args.present = call.output(Self::kPresent);
    return args;
}

template <class Self>
void output_shapes(ShapeRule const& rule, nvinfer1::DimsExprs* outputs) {
    outputs[Self::kY] = rule.shape(Self::kX);
    outputs[Self::kPresent] = rule.shape(Self::kPast);
}

template <class Self>
Op const& decoder() {
    static Op const op{
        Self::definition(),
        output_shapes<Self>,
        kernel_calls<arguments<Self>, trtNvfp4DecoderWorkspace, trtNvfp4DecoderTactics, trtNvfp4Decoder>(),
    };
    return op;
}

}  // namespace

template <>
Op const& adapter<NVFP4Decoder>() {
    return decoder<NVFP4Decoder>();
}

template <>
Op const& adapter<NVFP4MoEDecoder>() {
    return decoder<NVFP4MoEDecoder>();
}

}  // namespace trt_nvfp4
