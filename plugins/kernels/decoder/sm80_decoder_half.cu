#include "decoder/find_kernel.cuh"

namespace trt_nvfp4::decoder {

template DecoderKernel<__half> find_kernel<__half, false>(int m, int head_dim, bool experts);

}  // namespace trt_nvfp4::decoder
