// The W4A4 GEMMs of mixtures of experts on SM120 and SM121.
#include "w4a4/sm120_w4a4_gemm.cuh"
#include "w4a4/w4a4_experts.cuh"

namespace trt_nvfp4 {

using Kernel = W4A4ExpertsKernel<sm120::Mainloop, cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
                                                      sm120::Epilogue<ExpertsOutput>>>;

TrtNvfp4Status sm120_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream) {
    return launch_w4a4_experts<Kernel>(gemm, stream);
}

}  // namespace trt_nvfp4
