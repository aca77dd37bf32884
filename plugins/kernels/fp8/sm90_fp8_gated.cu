// The gate-up GEMMs in FP8 of SM90.
#include "fp8/sm90_fp8_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm90_fp8_gated_64x128(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm90::launch<Fp8GatedOutput, sm90::Config<64, 128, 1, 1>>(gemm, stream);
}

TrtNvfp4Status sm90_fp8_gated_64x128_rows(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm90::launch<Fp8GatedOutput, sm90::Config<64, 128, 2, 1>>(gemm, stream);
}

TrtNvfp4Status sm90_fp8_gated_128x128_rows(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm90::launch<Fp8GatedOutput, sm90::Config<128, 128, 2, 1>>(gemm, stream);
}

TrtNvfp4Status sm90_fp8_gated_128x128_columns(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm90::launch<Fp8GatedOutput, sm90::Config<128, 128, 1, 2>>(gemm, stream);
}

}  // namespace trt_nvfp4
