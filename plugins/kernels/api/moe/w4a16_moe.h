// Launcher of the W4A16 kernels for mixtures of experts (sm80_w4a16_moe.cuh, sm90_w4a16_moe.cuh) behind trtNvfp4Moe.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::w4a16 {

// 16-bit activations that stay 16-bit, every K a multiple of 32; any number of tokens.
bool serves(TrtNvfp4MoeArgs const& args);

// Of a call that is served: whether SM90's own kernel takes its number of tokens on the current GPU.
bool takes_sm90(TrtNvfp4MoeArgs const& args);

// Of a call that is served: whether SM90's own kernel serves it on the current GPU, at every number of tokens.
bool serves_sm90(TrtNvfp4MoeArgs const& args);

// Enough for every m up to args.m, on any GPU; 0 if the call is not served.
size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

// Tokens go in blocks, each of which reads the weights of its experts.
TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::w4a16
