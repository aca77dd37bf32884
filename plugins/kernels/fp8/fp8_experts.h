// GEMMs of the experts of a mixture in E4M3 on tensor cores, all experts in one launch.
#pragma once

#include "fp8/fp8_gemm.h"
#include "moe/experts_gemm.h"

namespace trt_nvfp4 {

using Fp8ExpertsGemm = ExpertsGemm<Fp8Gemm>;  // sums go to `out`, float32 [pairs, n]

// Tiles of rows x columns; a work item has as many pairs at most. `write` is kGated or kSums.
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_experts_64x128(Fp8ExpertsGemm const& gemm, cudaStream_t stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status sm90_fp8_experts_128x128(Fp8ExpertsGemm const& gemm, cudaStream_t stream);

}  // namespace trt_nvfp4
