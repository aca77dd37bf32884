// C API of the kernels: no TensorRT, no Torch, plain pointers. The plugin adapters are its only caller in the library.
//
// Every pointer but a workspace query's is device memory. T is `dtype`. Weights are E2M1 bytes (low nibble first) with
// E4M3 block scales in the 128x4 tiled order and one float32 multiplier per tensor:
//     w[n][k] = e2m1 * float(block_scale[n][k / 16]) * tensor_scale.
// K % 16 == 0 always. Launches are asynchronous on `stream`, allocate nothing and may be captured in a CUDA graph.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* TrtNvfp4Stream;

typedef enum {
    TRT_NVFP4_SUCCESS = 0,
    TRT_NVFP4_INVALID_ARGUMENT = 1,
    TRT_NVFP4_UNSUPPORTED = 2,  // a valid request that the chosen tactic cannot serve
    TRT_NVFP4_CUDA_ERROR = 3,
} TrtNvfp4Status;

typedef enum { TRT_NVFP4_FLOAT32 = 0, TRT_NVFP4_FLOAT16 = 1, TRT_NVFP4_BFLOAT16 = 2 } TrtNvfp4DataType;

typedef enum {
    TRT_NVFP4_IDENTITY = 0,
    TRT_NVFP4_RELU = 1,
    TRT_NVFP4_RELU2 = 2,
    TRT_NVFP4_SILU = 3,
    TRT_NVFP4_GELU = 4,
    TRT_NVFP4_GELU_TANH = 5,
    TRT_NVFP4_GELU_QUICK = 6,
    TRT_NVFP4_SWIGLU_CLAMPED = 7,  // gated only, as all from here on
    TRT_NVFP4_SILU_CLAMPED = 8,
} TrtNvfp4Activation;

// Which kernels serve a call. AUTO lets heuristics/ decide; an explicit tactic that cannot serve the call is
// TRT_NVFP4_UNSUPPORTED, never a silent fallback. TensorRT's timing caches and engines keep these numbers.
typedef enum {
    TRT_NVFP4_TACTIC_AUTO = 0,
    TRT_NVFP4_TACTIC_GENERIC = 1,  // every call
    // 16-bit activations, every K a multiple of 32. More than 64 tokens go in blocks of 64, but for NVFP4MoE.
    TRT_NVFP4_TACTIC_W4A16 = 2,
    // Block-scaled tensor cores: quantize_activations, float16 or bfloat16, every K a multiple of 32.
    TRT_NVFP4_TACTIC_W4A4 = 3,
    TRT_NVFP4_TACTIC_W4A4_PAIR = 4,       // the same by clusters of two CTAs
    TRT_NVFP4_TACTIC_FP8 = 5,             // FP8 tensor cores: float16 or bfloat16, hidden_out % 8 == 0; gated
    TRT_NVFP4_TACTIC_W4A16_MMA_SYNC = 6,  // W4A16 by every GPU's streaming kernels where it would not be
    TRT_NVFP4_TACTIC_W4A4_UNSPLIT = 7,    // W4A4 with no K split over CTAs where it would be
    TRT_NVFP4_TACTIC_W4A16_SM90 = 8,      // W4A16 by SM90's own kernels at every number of tokens
    // Attention of float16 or bfloat16 with heads of a multiple of 16: split over keys, at most 16 tokens of a
    // sequence; by blocks of queries.
    TRT_NVFP4_TACTIC_ATTENTION_DECODE = 9,
    TRT_NVFP4_TACTIC_ATTENTION_PREFILL = 10,
    // A decoder's layers in one launch: float16 or bfloat16, at most 16 tokens in all, heads of a multiple of 16 up to
    // 128, every K and number of rows a multiple of 32, on a GPU that can launch all blocks together.
    TRT_NVFP4_TACTIC_DECODER = 11,
    // Linear attention, d_k and d_v multiples of 16 up to 256: token by token with the state in registers; by chunks of
    // 64 tokens on tensor cores, of float16 or bfloat16 with no decay or one per head, as many query heads as KV heads.
    TRT_NVFP4_TACTIC_RECURRENT = 12,
    TRT_NVFP4_TACTIC_CHUNKED = 13,
} TrtNvfp4Tactic;

#define TRT_NVFP4_MAX_TACTICS 8

// The explicit tactics that serve a call on the current GPU, best first: AUTO takes the first. The first `sensible` may
// each be the fastest, so timing them is worth while; the others are yardsticks.
typedef struct {
    int32_t count, sensible;
    TrtNvfp4Tactic list[TRT_NVFP4_MAX_TACTICS];
} TrtNvfp4Tactics;

typedef struct {
    void const* packed;         // [rows, K/2]
    void const* block_scales;   // E4M3, padded to [ceil(rows/128)*128, ceil(K/16/4)*4], tiled
    float const* tensor_scale;  // [1]
    void const* bias;           // T [rows]
} TrtNvfp4Weight;

// y[m][n] = T(activation(x W^T + bias))
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Activation activation;
    int32_t quantize_activations;  // 1: x is quantized to NVFP4 and dequantized on the way in (W4A4)
    int32_t scale_search;          // as in TrtNvfp4QuantizeArgs
    int32_t residual_channels;     // as in TrtNvfp4QuantizeArgs; K of the weights is more by as many
    int32_t static_scales;         // 1: the caller knows that the input's tensor scale is not 0
    TrtNvfp4Tactic tactic;
    int64_t m, n, k;
    void const* x;  // T [m, k]
    TrtNvfp4Weight weight;
    float const* input_tensor_scale;  // [1]; 0 = from x's amax at run time
    void* y;                          // T [m, n]
} TrtNvfp4LinearArgs;

// Per layer l: n = norm ? T(rmsnorm(x) * norm_weight) : x; h = gated ? act(gate(n)) * up(n) : act(up(n));
// x = T(down(h) + (residual ? x : 0)). Arrays over layers are dense: layer l starts at l times one layer's size.
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Activation activation;
    int32_t gated;  // 1: up has 2 * intermediate rows, 2i = gate i, 2i + 1 = up i
    int32_t norm;
    int32_t residual;
    int32_t quantize_activations;  // 1: both GEMM inputs pass through NVFP4; h is quantized from float32
    int32_t scale_search;          // as in TrtNvfp4QuantizeArgs
    int32_t residual_channels;     // as in TrtNvfp4QuantizeArgs; K of the weights is more by as many
    int32_t static_scales;         // 1: the caller knows that the input and hidden tensor scales are not 0
    float epsilon, alpha, limit;
    TrtNvfp4Tactic tactic;
    int64_t layers, m, hidden_in, intermediate, hidden_out;
    void const* x;                     // T [m, hidden_in]
    void const* norm_weight;           // T [layers, hidden_in]; read when norm
    TrtNvfp4Weight up;                 // rows = intermediate * (1 + gated), K = hidden_in
    TrtNvfp4Weight down;               // rows = hidden_out, K = intermediate
    float const* input_tensor_scale;   // [layers]; 0 = at run time
    float const* hidden_tensor_scale;  // [layers]; 0 = at run time
    void* y;                           // T [m, hidden_out]
} TrtNvfp4MlpArgs;

// r = add_residual ? T(x + residual) : x; n = norm ? T(rmsnorm(r) * norm_weight) : r; the outputs are n in NVFP4.
typedef struct {
    TrtNvfp4DataType dtype;
    int32_t norm;
    int32_t add_residual;
    // Block scales tried, the one of the least squared error being kept. 0: amax / 6. 1: amax / 6 and amax / 4. 2: the
    // E4M3 codes 0, 1 below, 4 and 5 above that of amax / 6. With 1 and 2 a tensor scale found at run time leaves room.
    int32_t scale_search;
    // 16 to 64, a multiple of 16, or 0: so many last channels are followed by what NVFP4 loses of them, in NVFP4 under
    // the same tensor scale.
    int32_t residual_channels;
    float epsilon;
    int64_t m, k;
    void const* x;              // T [m, k]
    void const* residual;       // T [m, k]; read when add_residual
    void const* norm_weight;    // T [k]; read when norm
    float const* tensor_scale;  // [1]; 0 = from n's amax at run time
    void* packed;               // [m, (k + residual_channels)/2]
    void* block_scales;         // tiled over m, padding zeroed
    float* tensor_scale_out;    // [1]
    void* residual_out;         // T [m, k] = r
} TrtNvfp4QuantizeArgs;

// E4M3 weights: w[n][k] = values[n][k] * scales[n].
typedef struct {
    void const* values;   // [rows, K]
    float const* scales;  // [rows]
    void const* bias;     // T [rows]
} TrtNvfp4Fp8Weight;

// h = act(gate(x)) * up(x), y = T(down(h)); x and h are E4M3 under one scale each: e4m3(x / scale).
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Activation activation;
    int32_t static_scales;  // 1: the caller knows that both activation scales are not 0
    float alpha, limit;
    TrtNvfp4Tactic tactic;
    int64_t m, hidden_in, intermediate, hidden_out;
    void const* x;              // T [m, hidden_in]
    TrtNvfp4Fp8Weight up;       // rows = 2 * intermediate: 2i = gate i, 2i + 1 = up i
    TrtNvfp4Fp8Weight down;     // rows = hidden_out
    float const* input_scale;   // [1]; 0 = amax / 448 at run time
    float const* hidden_scale;  // [1]; 0 = amax / 448 at run time
    void* y;                    // T [m, hidden_out]
} TrtNvfp4Fp8MlpArgs;

typedef enum {
    TRT_NVFP4_SOFTMAX = 0,  // over all experts
    TRT_NVFP4_SIGMOID = 1,
    TRT_NVFP4_SOFTMAX_OF_CHOSEN = 2,  // chosen by the logits themselves
    TRT_NVFP4_SIGMOID_OF_CHOSEN = 3,
    TRT_NVFP4_SQRT_SOFTPLUS = 4,
    TRT_NVFP4_GIVEN = 5,  // logits are weights; the lowest float32, and what counts as it, weighs 0
} TrtNvfp4Scoring;

#define TRT_NVFP4_MAX_EXPERTS 1024
#define TRT_NVFP4_MAX_TOP_K 64

// y[t] = T(sum over ranks r of weight[t][r] * expert[t][r](x[t]) + shared(x[t])); see NVFP4MoE in docs/reference/ops.md
// for how experts and weights follow from the logits. An expert is gated ? down(act(gate(x)) * up(x)) :
// down(act(up(x))).
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Activation activation;
    TrtNvfp4Scoring scoring;
    int32_t gated;  // 1: up has 2 * intermediate rows, 2i = gate i, 2i + 1 = up i
    int32_t quantize_activations;
    int32_t scale_search;       // as in TrtNvfp4QuantizeArgs
    int32_t residual_channels;  // as in TrtNvfp4QuantizeArgs; K of the weights is more by as many
    int32_t static_scales;      // 1: the caller knows that the input and hidden tensor scales are not 0
    int32_t renormalize;
    int32_t scale_input;   // 1: weight[t][r] multiplies the expert's input, T(weight * x), instead of its output
    int32_t shared;        // 1: there is a shared expert
    int32_t shared_gated;  // 1: shared(x) is multiplied by sigmoid(x . shared_gate)
    int32_t top_k, groups, open_groups, group_score_top;
    float scaling_factor, alpha, limit;
    TrtNvfp4Tactic tactic;
    int64_t m, experts, hidden, intermediate, shared_intermediate;
    void const* x;                 // T [m, hidden]
    float const* router_logits;    // [m, experts]
    float const* correction_bias;  // [experts]
    TrtNvfp4Weight up, down;       // arrays over experts are dense
    TrtNvfp4Weight shared_up, shared_down;
    void const* shared_gate;           // T [hidden]
    float const* input_tensor_scale;   // [1]; 0 = at run time
    float const* hidden_tensor_scale;  // [1]; 0 = at run time
    void* y;                           // T [m, hidden]
} TrtNvfp4MoeArgs;

// The same sum of experts in E4M3; x and the hidden activations as in TrtNvfp4Fp8MlpArgs, their scales, amax / 448
// where 0, being moe's. The weights of moe and its quantize_activations are not read.
typedef struct {
    TrtNvfp4MoeArgs moe;
    TrtNvfp4Fp8Weight up, down;  // arrays over experts are dense
    TrtNvfp4Fp8Weight shared_up, shared_down;
} TrtNvfp4Fp8MoeArgs;

#define TRT_NVFP4_MAX_HEAD_DIM 256

typedef enum {
    TRT_NVFP4_ROPE_NONE = 0,
    TRT_NVFP4_ROPE_HALVES = 1,       // pairs (i, i + rotary_dim / 2)
    TRT_NVFP4_ROPE_INTERLEAVED = 2,  // pairs (2i, 2i + 1)
} TrtNvfp4Rope;

// Appends the new tokens' keys and values to the caches and attends to them, see CachedAttention in
// docs/reference/ops.md. Where present and past are at one address nothing else of the caches is written; else all is
// copied first.
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Rope rope;
    int32_t fp8_cache;     // 1: caches are E4M3, 0: T
    int32_t wide_lengths;  // 1: past_length is int64, 0: int32
    int32_t qk_norm, has_sinks;
    int32_t window;                 // 0: none
    float epsilon, scale, softcap;  // scale 0: 1 / sqrt(head_dim); softcap 0: none
    TrtNvfp4Tactic tactic;
    int64_t batch, tokens, heads, kv_heads, head_dim, capacity, rotary_dim, positions;
    void const* qkv;            // T [batch, tokens, heads + 2 kv_heads, head_dim]
    void const* past_key;       // [batch, kv_heads, capacity, head_dim]
    void const* past_value;     // [batch, kv_heads, capacity, head_dim]
    void const* past_length;    // [batch]
    float const* cos;           // [positions, rotary_dim / 2]; read with rope, as sin
    float const* sin;           // [positions, rotary_dim / 2]
    void const* q_norm_weight;  // T [head_dim]; read when qk_norm, as k_norm_weight
    void const* k_norm_weight;  // T [head_dim]
    float const* sinks;         // [heads]; read when has_sinks
    float const* key_scale;     // [kv_heads]; read when fp8_cache, as value_scale
    float const* value_scale;   // [kv_heads]
    void* y;                    // T [batch, tokens, heads, head_dim]
    void* present_key;
    void* present_value;
} TrtNvfp4AttentionArgs;

// Per layer l: a = attention of qkv(rmsnorm(x)) over cache l, see CachedAttention in docs/reference/ops.md; r =
// T(output(a) + x); x = T(down(act(gate(rmsnorm(r))) * up(rmsnorm(r))) + r). Arrays over layers are dense. The generic
// tactic rounds output(a) to T before it adds x.
typedef struct {
    TrtNvfp4DataType dtype;
    TrtNvfp4Activation activation;
    TrtNvfp4Rope rope;
    int32_t fp8_cache;     // 1: caches are E4M3, 0: T
    int32_t wide_lengths;  // 1: past_length is int64, 0: int32
    int32_t qk_norm;
    int32_t window;                               // 0: none
    float epsilon, scale, softcap, alpha, limit;  // scale 0: 1 / sqrt(head_dim); softcap 0: none
    TrtNvfp4Tactic tactic;
    int64_t layers, batch, tokens, hidden, intermediate, heads, kv_heads, head_dim, capacity, rotary_dim, positions;
    // A mixture in place of the MLP, as of TrtNvfp4MoeArgs, by logits of rmsnorm(r); up and down are then
    // [layers, experts].
    int64_t experts;  // 0: none, and nothing of the mixture is read
    TrtNvfp4Scoring scoring;
    int32_t top_k, renormalize;
    float scaling_factor;
    void const* router_weight;          // T [layers, experts, hidden]
    void const* x;                      // T [batch, tokens, hidden]
    void const* past;                   // [layers, 2, batch, kv_heads, capacity, head_dim]: keys, values
    void const* past_length;            // [batch]
    float const* cos;                   // [positions, rotary_dim / 2]; read with rope, as sin
    float const* sin;                   // [positions, rotary_dim / 2]
    void const* attention_norm_weight;  // T [layers, hidden]
    void const* q_norm_weight;          // T [layers, head_dim]; read when qk_norm, as k_norm_weight
    void const* k_norm_weight;          // T [layers, head_dim]
    float const* key_scale;             // [layers, kv_heads]; read when fp8_cache, as value_scale
    float const* value_scale;           // [layers, kv_heads]
    TrtNvfp4Weight qkv;                 // rows = (heads + 2 kv_heads) head_dim, K = hidden
    TrtNvfp4Weight output;              // rows = hidden, K = heads head_dim
    void const* mlp_norm_weight;        // T [layers, hidden]
    TrtNvfp4Weight up;                  // rows = 2 intermediate: 2i = gate i, 2i + 1 = up i; K = hidden
    TrtNvfp4Weight down;                // rows = hidden, K = intermediate
    void* y;                            // T [batch, tokens, hidden]
    void* present;                      // where it is not past, all is copied first
} TrtNvfp4DecoderArgs;

// Bits: whether there is a decay, whether beta and the delta correction.
typedef enum {
    TRT_NVFP4_RULE_LINEAR = 0,
    TRT_NVFP4_RULE_GATED = 1,
    TRT_NVFP4_RULE_DELTA = 2,
    TRT_NVFP4_RULE_GATED_DELTA = 3,
} TrtNvfp4UpdateRule;

// ONNX's LinearAttention, see docs/reference/ops.md; states may be at one address.
typedef struct {
    TrtNvfp4DataType dtype, state_dtype;
    TrtNvfp4UpdateRule rule;
    float scale;  // 0: 1 / sqrt(key_dim)
    TrtNvfp4Tactic tactic;
    int64_t batch, tokens, heads, kv_heads, key_dim, value_dim;
    int64_t decay_dim;       // of a KV head: 1 or key_dim; read when gated
    int64_t beta_heads;      // 1 or kv_heads; read when delta
    void const* query;       // T [batch, tokens, heads, key_dim]
    void const* key;         // T [batch, tokens, kv_heads, key_dim]
    void const* value;       // T [batch, tokens, kv_heads, value_dim]
    void const* past_state;  // [batch, kv_heads, key_dim, value_dim]; null: zeros
    void const* decay;       // T [batch, tokens, kv_heads, decay_dim], logarithms
    void const* beta;        // T [batch, tokens, beta_heads]
    void* y;                 // T [batch, tokens, heads, value_dim]
    void* present_state;     // [batch, kv_heads, key_dim, value_dim]
} TrtNvfp4LinearAttentionArgs;

// ONNX's CausalConvWithState: y[c][t] = act(bias[c] + sum over j of weight[c][j] * x[c][t - width + 1 + j]), the state
// being what lies before x. States may be at one address.
typedef struct {
    TrtNvfp4DataType dtype;
    int32_t silu;
    int64_t batch, channels, tokens, width;
    void const* x;           // T [batch, channels, tokens]
    void const* weight;      // T [channels, width]
    void const* bias;        // T [channels]; null: zeros
    void const* past_state;  // T [batch, channels, width - 1]; null: zeros
    void* y;                 // T [batch, channels, tokens]
    void* present_state;     // T [batch, channels, width - 1]
} TrtNvfp4CausalConvArgs;

// Workspace in bytes. Needs no GPU, reads no pointer and grows with m, so a query at the largest m serves all: TensorRT
// asks on a machine without a GPU. Of AUTO it is what any sensible tactic needs on any GPU.
TrtNvfp4Status trtNvfp4LinearWorkspace(TrtNvfp4LinearArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4MlpWorkspace(TrtNvfp4MlpArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4QuantizeWorkspace(TrtNvfp4QuantizeArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4Fp8MlpWorkspace(TrtNvfp4Fp8MlpArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4MoeWorkspace(TrtNvfp4MoeArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4Fp8MoeWorkspace(TrtNvfp4Fp8MoeArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4AttentionWorkspace(TrtNvfp4AttentionArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4DecoderWorkspace(TrtNvfp4DecoderArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4LinearAttentionWorkspace(TrtNvfp4LinearAttentionArgs const* args, size_t* bytes);
TrtNvfp4Status trtNvfp4CausalConvWorkspace(TrtNvfp4CausalConvArgs const* args, size_t* bytes);

// Reads no pointer, nor args->tactic. Without a GPU the answer is that of a GPU that has no kernels of its own.
TrtNvfp4Status trtNvfp4LinearTactics(TrtNvfp4LinearArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4MlpTactics(TrtNvfp4MlpArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4QuantizeTactics(TrtNvfp4QuantizeArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4Fp8MlpTactics(TrtNvfp4Fp8MlpArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4MoeTactics(TrtNvfp4MoeArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4Fp8MoeTactics(TrtNvfp4Fp8MoeArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4AttentionTactics(TrtNvfp4AttentionArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4DecoderTactics(TrtNvfp4DecoderArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4LinearAttentionTactics(TrtNvfp4LinearAttentionArgs const* args, TrtNvfp4Tactics* tactics);
TrtNvfp4Status trtNvfp4CausalConvTactics(TrtNvfp4CausalConvArgs const* args, TrtNvfp4Tactics* tactics);

// `workspace` is 256-byte aligned device memory of at least the queried size; its content is arbitrary before and
// after.
TrtNvfp4Status trtNvfp4Linear(TrtNvfp4LinearArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Mlp(TrtNvfp4MlpArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Quantize(TrtNvfp4QuantizeArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Fp8Mlp(TrtNvfp4Fp8MlpArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Moe(TrtNvfp4MoeArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Fp8Moe(TrtNvfp4Fp8MoeArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Attention(TrtNvfp4AttentionArgs const* args, void* workspace, size_t bytes,
                                 TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4Decoder(TrtNvfp4DecoderArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4LinearAttention(TrtNvfp4LinearAttentionArgs const* args, void* workspace, size_t bytes,
                                       TrtNvfp4Stream stream);
TrtNvfp4Status trtNvfp4CausalConv(TrtNvfp4CausalConvArgs const* args, void* workspace, size_t bytes,
                                  TrtNvfp4Stream stream);

// The first error recorded in this process since the last call, or "" if none; reading it clears it. Exported from the
// plugin library, because TensorRT swallows what fails in a workspace query or in serialization.
char const* trtNvfp4LastError(void);

#ifdef __cplusplus
}
#endif
