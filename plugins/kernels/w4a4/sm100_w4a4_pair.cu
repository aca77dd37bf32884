// The W4A4 GEMMs of SM100 and SM103 without gates, by clusters of two CTAs.
#ifndef TRT_NVFP4_WITHOUT_PAIRS
#include "w4a4/sm100_w4a4_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm100_w4a4_dense_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<DenseOutput, 2>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_plain_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<false>, 2>>(gemm, stream);
}

}  // namespace trt_nvfp4
#endif
