// GEMMs of E4M3 activations with E4M3 weights on tensor cores: what a launch needs. Free of CUTLASS, whose
// headers only the translation units of an architecture that needs them see.
#pragma once

#include "formats/fp8_matrix.cuh"

namespace trt_nvfp4 {

// Rows that there is room for: whole tiles. What lies in those beyond the last is read, whatever it is, and goes
// nowhere; the copy engine would take longer to put zeros in their place.
inline int64_t padded_fp8_rows(int64_t m) { return (m + 127) / 128 * 128; }

// Dense: out = T(a W^T + bias). Gated: hidden = E4M3(act(gate) * up), rows 2i and 2i + 1 of W being gate i and up i.
struct Fp8Gemm {
    int64_t m, n, k;
    Fp8Rows a;      // [m, k], in room for padded_fp8_rows(m)
    Fp8Channels w;  // [n, k]
    TrtNvfp4DataType dtype;
    void const* bias;  // T [n]
    // Dense only.
    void* out;           // T [m, n]
    int splits;          // of K over CTAs; k / splits is a multiple of 16
    float* partials;     // [splits] partial sums; unless splits is 1
    uint32_t* arrivals;  // zeros at launch; unless splits is 1
    // Gated only.
    TrtNvfp4Activation activation;
    float alpha, limit;
    uint8_t* hidden;  // E4M3 [m, n/2], in such room too
    Fp8Scale hidden_scale;
    uint32_t* hidden_amax;  // where the amax pass leaves the amax's bits
    bool amax_pass;         // only find the amax; nothing to do where the scale is given
};

constexpr int kFp8Warps = 4;  // that share a tile; each adds up its own part of the splits

// Tiles of rows x columns by one CTA; of the two CTAs of a cluster, if any, one has the next rows (_rows) or columns
// (_columns). Asynchronous; no workspace beyond what the arguments point to. m is 1 to 2^31 - 128, n and k to 2^31 - 1.
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_gated_64x128(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_gated_64x128_rows(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_gated_128x128_rows(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_gated_128x128_columns(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_dense_64x64(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_dense_64x128(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_dense_128x64(Fp8Gemm const& gemm,
                                                        cudaStream_t stream);  // a cluster, as _rows
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_dense_128x128_rows(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_dense_128x128_columns(Fp8Gemm const& gemm, cudaStream_t stream);

// The same by mma.sync; neither clusters nor programmatic launches.
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm89_fp8_gated_64x128(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm89_fp8_gated_128x128(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm89_fp8_dense_64x128(Fp8Gemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm89_fp8_dense_128x128(Fp8Gemm const& gemm, cudaStream_t stream);

}  // namespace trt_nvfp4
