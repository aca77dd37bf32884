#include "decoder/find_kernel.cuh"

namespace trt_nvfp4::decoder {

template DecoderKernel<__nv_bfloat16> find_kernel<__nv_bfloat16, false>(int m, int head_dim, bool experts);

}  // namespace trt_nvfp4::decoder
