// The W4A4 GEMMs of SM100, SM103 and SM110 without gates. One object: the front end takes most of a minute for
// CUTLASS's main loop, whatever the number of epilogues.
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

}  // namespace trt_nvfp4
