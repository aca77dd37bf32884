// Launcher of the tensor-core kernels for mixtures of experts in FP8 (fp8_experts.h) behind trtNvfp4Fp8Moe.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::fp8 {

// Enough for every m up to args.moe.m, on any GPU.
size_t workspace_bytes(TrtNvfp4Fp8MoeArgs const& args);

TrtNvfp4Status launch(TrtNvfp4Fp8MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::fp8
