// GEMMs of the experts of a mixture on Blackwell's block-scaled tensor cores, all experts in one launch.
#pragma once

#include "moe/experts_gemm.h"
#include "w4a4/w4a4_gemm.h"

namespace trt_nvfp4 {

constexpr int kW4a4ExpertRows = 128;  // of a tile: the most pairs of a work item

using W4A4ExpertsGemm = ExpertsGemm<W4A4Gemm>;  // sums go to `partials`

TRT_NVFP4_OPTIONAL TrtNvfp4Status sm100_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm120_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream);

}  // namespace trt_nvfp4
