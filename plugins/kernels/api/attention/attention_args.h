// Attention's arguments: a decoder layer's call of it, and a call as kernels see it.
#pragma once

#include <cmath>

#include "api/trt_nvfp4.h"
#include "api/validate.h"
#include "attention/args.cuh"

namespace trt_nvfp4::attention {

// Returns the attention arguments of one decoder layer; the caller sets qkv and y.
inline TrtNvfp4AttentionArgs of_layer(TrtNvfp4DecoderArgs const& args, int64_t layer) {
    int64_t const element = element_size(args.dtype);
    int64_t const cache =
        args.batch * args.kv_heads * args.capacity * args.head_dim * (args.fp8_cache != 0 ? 1 : element);
    auto const bytes = [](void const* all, int64_t at) { return static_cast<uint8_t const*>(all) + at; };
    TrtNvfp4AttentionArgs result{};
    result.dtype = args.dtype;
    result.rope = args.rope;
    result.fp8_cache = args.fp8_cache;
    result.wide_lengths = args.wide_lengths;
    result.qk_norm = args.qk_norm;
    result.window = args.window;
    result.epsilon = args.epsilon;
    result.scale = args.scale;
    result.softcap = args.softcap;
    result.batch = args.batch;
    result.tokens = args.tokens;
    result.heads = args.heads;
    result.kv_heads = args.kv_heads;
    result.head_dim = args.head_dim;
    result.capacity = args.capacity;
    result.rotary_dim = args.rotary_dim;
    result.positions = args.positions;
    result.past_length = args.past_length;
    result.cos = args.cos;
    result.sin = args.sin;
    result.q_norm_weight = bytes(args.q_norm_weight, layer * args.head_dim * element);
    result.k_norm_weight = bytes(args.k_norm_weight, layer * args.head_dim * element);
    result.key_scale = args.key_scale + layer * args.kv_heads;
    result.value_scale = args.value_scale + layer * args.kv_heads;
    result.present_key = static_cast<uint8_t*>(args.present) + 2 * layer * cache;
    result.present_value = static_cast<uint8_t*>(args.present) + (2 * layer + 1) * cache;
    result.past_key = result.present_key;
    result.past_value = result.present_value;
    return result;
}

template <typename T>
Args<T> kernel_args(TrtNvfp4AttentionArgs const& args) {
    Args<T> result{};
    result.batch = static_cast<int>(args.batch);
    result.tokens = static_cast<int>(args.tokens);
    result.heads = static_cast<int>(args.heads);
    result.kv_heads = static_cast<int>(args.kv_heads);
    result.head_dim = static_cast<int>(args.head_dim);
    result.capacity = static_cast<int>(args.capacity);
    result.group = static_cast<int>(args.heads / args.kv_heads);
    result.window = args.window;
    result.rotary = args.rope == TRT_NVFP4_ROPE_NONE ? 0 : static_cast<int>(args.rotary_dim);
    result.interleaved = args.rope == TRT_NVFP4_ROPE_INTERLEAVED;
    result.positions = static_cast<int>(args.positions);
    result.wide_lengths = args.wide_lengths;
    result.epsilon = args.epsilon;
    result.scale = args.scale > 0.0f ? args.scale : 1.0f / std::sqrt(static_cast<float>(args.head_dim));
    result.softcap = args.softcap;
    result.qkv = static_cast<T const*>(args.qkv);
    result.keys = args.present_key;
    result.values = args.present_value;
    result.past_length = args.past_length;
    result.cosines = args.cos;
    result.sines = args.sin;
    result.query_norm = args.qk_norm ? static_cast<T const*>(args.q_norm_weight) : nullptr;
    result.key_norm = args.qk_norm ? static_cast<T const*>(args.k_norm_weight) : nullptr;
    result.sinks = args.has_sinks ? args.sinks : nullptr;
    result.key_scale = args.key_scale;
    result.value_scale = args.value_scale;
    result.y = static_cast<T*>(args.y);
    return result;
}

}  // namespace trt_nvfp4::attention
