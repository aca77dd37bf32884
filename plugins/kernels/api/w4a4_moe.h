// Launcher of the W4A4 kernels for mixtures of experts (w4a4_experts.cuh) behind trtNvfp4Moe.
#pragma once

#include "trt_nvfp4.h"

namespace trt_nvfp4::w4a4 {

// 16-bit activations that are quantized, every K a multiple of 32; whatever the library and the GPU.
bool fits(TrtNvfp4MoeArgs const& args);

// What fits, and this library has kernels of the current GPU for.
bool serves(TrtNvfp4MoeArgs const& args);

// Enough for every m up to args.m, on any GPU; 0 if the call does not fit.
size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::w4a4
