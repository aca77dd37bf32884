// The GEMMs of mixtures of experts in FP8 of SM90.
#include "fp8/sm90_fp8_experts.cuh"

namespace trt_nvfp4 {
namespace {

template <class Config>
TrtNvfp4Status launch(Fp8ExpertsGemm const& gemm, cudaStream_t stream) {
    return gemm.write == ExpertsWrite::kGated ? sm90::launch_experts<Fp8GatedOutput, Config>(gemm, stream)
                                              : sm90::launch_experts<Fp8SumsOutput, Config>(gemm, stream);
}

}  // namespace

TrtNvfp4Status sm90_fp8_experts_64x128(Fp8ExpertsGemm const& gemm, cudaStream_t stream) {
    return launch<sm90::Config<64, 128, 1, 1>>(gemm, stream);
}

TrtNvfp4Status sm90_fp8_experts_128x128(Fp8ExpertsGemm const& gemm, cudaStream_t stream) {
    return launch<sm90::Config<128, 128, 1, 1>>(gemm, stream);
}

}  // namespace trt_nvfp4
