// The W4A4 GEMMs of mixtures of experts on SM100, SM103 and SM110.
#include "w4a4/sm100_w4a4_gemm.cuh"
#include "w4a4/w4a4_experts.cuh"

namespace trt_nvfp4 {

using Kernel = W4A4ExpertsKernel<
    sm100::Mainloop<1>,
    cutlass::epilogue::collective::detail::Sm100TmaWarpSpecializedAdapter<sm100::Epilogue<ExpertsOutput>>>;

TrtNvfp4Status sm100_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream) {
    return launch_w4a4_experts<Kernel>(gemm, stream);
}

}  // namespace trt_nvfp4
