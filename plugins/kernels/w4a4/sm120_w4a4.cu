// The W4A4 GEMMs of SM120 and SM121 without gates. One object: the front end takes most of a minute for CUTLASS's
// main loop, whatever the number of epilogues.
#include "w4a4/sm120_w4a4_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm120_w4a4_dense(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm120::Kernel<DenseOutput>>(gemm, stream);
}

TrtNvfp4Status sm120_w4a4_partial(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm120::Kernel<PartialOutput>>(gemm, stream);
}

TrtNvfp4Status sm120_w4a4_plain(W4A4Gemm const& gemm, cudaStream_t stream) {
    return launch_w4a4<sm120::Kernel<HiddenOutput<false>>>(gemm, stream);
}

}  // namespace trt_nvfp4
