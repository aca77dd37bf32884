// One call of linear attention as the kernels see it. Per KV head, with a state S [key_dim, value_dim] in float32:
//     S *= exp(decay);  u = v, or beta (v - k S);  S += k^T u;  y = scale q S for each of its query heads.
#pragma once

#include <cstdint>

namespace trt_nvfp4::recurrent {

constexpr int kMaxDim = 256;  // of keys and values, of the kernels that hold states in registers

template <typename T>
struct Args {
    int batch, tokens, heads, kv_heads, key_dim, value_dim;
    int group;       // heads / kv_heads
    int decay_dim;   // 0: no decay, 1: one of a head, key_dim: one of each row of the state
    int beta_heads;  // 0: no delta correction, 1: one of a token, kv_heads
    float scale;
    T const* query;     // [batch, tokens, heads, key_dim]
    T const* key;       // [batch, tokens, kv_heads, key_dim]
    T const* value;     // [batch, tokens, kv_heads, value_dim]
    T const* decay;     // [batch, tokens, kv_heads, decay_dim], logarithms
    T const* beta;      // [batch, tokens, beta_heads]
    float const* past;  // [batch, kv_heads, key_dim, value_dim]; null: zeros
    T* y;               // [batch, tokens, heads, value_dim]
    float* present;

    // A KV head's row of a token, of `width` elements each.
    __device__ int64_t row(int batch_index, int token, int kv_head, int width) const {
        return ((int64_t{batch_index} * tokens + token) * kv_heads + kv_head) * width;
    }
    __device__ int64_t state(int batch_index, int kv_head) const {
        return (int64_t{batch_index} * kv_heads + kv_head) * key_dim * value_dim;
    }
    __device__ T beta_of(int batch_index, int token, int kv_head) const {
        return beta[(int64_t{batch_index} * tokens + token) * beta_heads + (beta_heads == 1 ? 0 : kv_head)];
    }
};

}  // namespace trt_nvfp4::recurrent
