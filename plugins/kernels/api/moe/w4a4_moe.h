// Launcher of the W4A4 kernels for mixtures of experts (w4a4_experts.cuh) behind trtNvfp4Moe.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::w4a4 {

// Enough for every m up to args.m, on any GPU; 0 where no GPU serves the call.
size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::w4a4
