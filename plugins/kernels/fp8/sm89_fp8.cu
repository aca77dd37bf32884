// The GEMMs in FP8 of SM89, SM120 and SM121.
#include "fp8/sm89_fp8_gemm.cuh"

namespace trt_nvfp4 {

TrtNvfp4Status sm89_fp8_gated_64x128(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm89::launch<Fp8GatedOutput, sm89::Config<64, 128>>(gemm, stream);
}

TrtNvfp4Status sm89_fp8_gated_128x128(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm89::launch<Fp8GatedOutput, sm89::Config<128, 128>>(gemm, stream);
}

TrtNvfp4Status sm89_fp8_dense_64x128(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm89::launch<Fp8DenseOutput, sm89::Config<64, 128>>(gemm, stream);
}

TrtNvfp4Status sm89_fp8_dense_128x128(Fp8Gemm const& gemm, cudaStream_t stream) {
    return sm89::launch<Fp8DenseOutput, sm89::Config<128, 128>>(gemm, stream);
}

}  // namespace trt_nvfp4
