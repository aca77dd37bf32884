// The W4A4 GEMMs of SM100, SM103 and SM110.
#include "w4a4/sm100_w4a4_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm100_w4a4_dense(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<DenseOutput, 1>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_partial(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<PartialOutput, 1>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_plain(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<false>, 1>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_gated(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<true>, 1>>(gemm, stream);
}

#ifndef TRT_NVFP4_WITHOUT_PAIRS
TrtNvfp4Status sm100_w4a4_dense_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<DenseOutput, 2>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_plain_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<false>, 2>>(gemm, stream);
}

TrtNvfp4Status sm100_w4a4_gated_pair(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm100::Kernel<HiddenOutput<true>, 2>>(gemm, stream);
}
#endif

}  // namespace trt_nvfp4
