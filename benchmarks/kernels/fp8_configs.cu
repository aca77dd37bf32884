// One GEMM of FP8GatedMLP on Hopper with a tile, a cluster and warps of one's choice: -DCONFIG=rows,columns,cluster
// rows,cluster columns,warps and -DOUTPUT=Fp8GatedOutput or Fp8DenseOutput. fp8_sweep.py compiles and times many.
#include "fp8/sm90_fp8_gemm.cuh"

using namespace trt_nvfp4;

// GELU (tanh) where gated; bfloat16 in and out.
extern "C" int fp8_gemm(int m, int n, int k, int splits, void const* a, float const* a_scale, void const* w,
                        float const* w_scales, void const* bias, float const* hidden_scale, void* out, float* partials,
                        unsigned* arrivals, void* stream) {
    Fp8Gemm gemm{};
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.a = {static_cast<uint8_t const*>(a), {a_scale, nullptr}};
    gemm.w = {static_cast<uint8_t const*>(w), w_scales};
    gemm.dtype = TRT_NVFP4_BFLOAT16;
    gemm.bias = bias;
    gemm.out = out;
    gemm.splits = splits;
    gemm.partials = partials;
    gemm.arrivals = arrivals;
    gemm.activation = TRT_NVFP4_GELU_TANH;
    gemm.hidden = static_cast<uint8_t*>(out);
    gemm.hidden_scale = {hidden_scale, nullptr};
    return sm90::launch<OUTPUT, sm90::Config<CONFIG>>(gemm, static_cast<cudaStream_t>(stream));
}
