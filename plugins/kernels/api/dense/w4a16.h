// Launcher of the W4A16 decode kernels (sm80_w4a16_token.cuh, sm80_w4a16_mlp.cuh, that of small linears: w4a16_small.h,
// and SM90's: sm90_w4a16.h) behind trtNvfp4Linear and trtNvfp4Mlp.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::w4a16 {

// Whether the kernel can serve the call: 16-bit activations that stay 16-bit, 1 token or more, every K a multiple
// of 32.
bool serves(TrtNvfp4LinearArgs const& args);
bool serves(TrtNvfp4MlpArgs const& args);

// Of a call that is served: whether SM90's own kernels take its number of tokens on the current GPU.
bool takes_sm90(TrtNvfp4LinearArgs const& args);
bool takes_sm90(TrtNvfp4MlpArgs const& args);

// Of a call that is served: whether SM90's own kernels serve it on the current GPU, at every number of tokens.
bool serves_sm90(TrtNvfp4LinearArgs const& args);
bool serves_sm90(TrtNvfp4MlpArgs const& args);

// Enough for every m up to args.m, on any GPU; 0 if the call is not served.
size_t workspace_bytes(TrtNvfp4LinearArgs const& args);
size_t workspace_bytes(TrtNvfp4MlpArgs const& args);

// Tokens go in blocks of kMaxTokens, each of which reads the weights. From sm_90 on the kernel reads weights, their
// scales and biases while the kernel launched before it still runs, so that one must not write them.
TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream);
TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::w4a16
