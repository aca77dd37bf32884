// GEMMs of NVFP4 activations with NVFP4 weights on Blackwell's block-scaled tensor cores: what a launch needs. Free of
// CUTLASS, whose headers only the translation units of an architecture that has such tensor cores see.
#pragma once

#include "formats/nvfp4_matrix.cuh"

namespace trt_nvfp4 {

// Dense: out = T(activation(a W^T + bias) + residual). The others write hidden and not out. Plain: hidden =
// NVFP4(activation(a W^T + bias)). Gated: hidden = NVFP4(act(gate) * up), rows 2i and 2i + 1 of W being gate i and up
// i. Partial: partials = the raw sums of each of `splits` equal parts of K, for w4a4_split.cuh to add up. T is float16
// or bfloat16.
struct W4A4Gemm {
    int64_t m, n, k;  // none is 0
    Nvfp4Rows a;      // [m, k]
    Nvfp4Rows w;      // [n, k]
    TrtNvfp4DataType dtype;
    void const* bias;  // T [n]
    TrtNvfp4Activation activation;
    void const* residual;  // T [m, n], added last; null: none. May be out itself.
    void* out;             // T [m, n]
    int splits = 1;        // parts of K, each a multiple of 64; more than 1 for Partial only
    float* partials;       // [splits, m, n]
    float alpha, limit;
    Nvfp4Matrix hidden;         // [m, n], gated [m, n/2]
    float const* hidden_scale;  // [1]; 0: from the amax that the amax pass leaves in hidden.amax_bits
    bool amax_pass;             // only find the amax; nothing to do where the scale is given
};

// Per architecture family; `_pair`: by clusters of two CTAs. Asynchronous; no workspace beyond what the arguments point
// to.
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_dense(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_partial(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_plain(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_gated(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_dense_pair(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_plain_pair(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_gated_pair(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm120_w4a4_dense(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm120_w4a4_partial(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm120_w4a4_plain(W4A4Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm120_w4a4_gated(W4A4Gemm const& gemm, cudaStream_t stream);

}  // namespace trt_nvfp4
