// The W4A4 GEMM of SM120 and SM121 that writes gated hidden values.
#include "w4a4/sm120_w4a4_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm120_w4a4_gated(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm120::Kernel<HiddenOutput<true>>>(gemm, stream);
}

}  // namespace trt_nvfp4
