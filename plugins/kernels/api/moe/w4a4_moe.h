// Launcher of the W4A4 kernels for mixtures of experts (w4a4_experts.cuh) behind trtNvfp4Moe.
#pragma once

#include "api/launch.h"

namespace trt_nvfp4::w4a4 {

// Enough for a call that w4a4_fits() accepts, at every m up to args.m, on any GPU.
TRT_NVFP4_OPTIONAL size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

TRT_NVFP4_OPTIONAL TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::w4a4
