// The W4A4 GEMMs of SM100, SM103 and SM110 that write gated hidden values.
#include "w4a4/sm100_w4a4_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm100_w4a4_gated(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<true>, 1>>(gemm, stream);
}

#ifndef TRT_NVFP4_WITHOUT_PAIRS
TrtNvfp4Status sm100_w4a4_gated_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<true>, 2>>(gemm, stream);
}
#endif

}  // namespace trt_nvfp4
