// Launcher of the W4A16 decode kernels (sm80_w4a16_token.cuh, sm80_w4a16_mlp.cuh, that of small linears: w4a16_small.h,
// and SM90's: sm90_w4a16.h) behind trtNvfp4Linear and trtNvfp4Mlp.
#pragma once

#include "api/launch.h"

namespace trt_nvfp4::w4a16 {

// 16-bit activations that stay 16-bit: only calls with these need the functions below to be linked.
template <typename Args>
bool is_arithmetic_of(Args const& args) {
    return args.dtype != TRT_NVFP4_FLOAT32 && !args.quantize_activations;
}

// Whether the kernel can serve the call: such activations, 1 token or more, every K a multiple of 32 (copies are 16
// bytes: 32 codes of a row).
inline bool serves(TrtNvfp4LinearArgs const& args) { return is_arithmetic_of(args) && args.m >= 1 && args.k % 32 == 0; }
inline bool serves(TrtNvfp4MlpArgs const& args) {
    return is_arithmetic_of(args) && args.m >= 1 && args.hidden_in % 32 == 0 && args.intermediate % 32 == 0;
}

// True if SM90's own kernels take a served call's number of tokens on the current GPU.
TRT_NVFP4_OPTIONAL bool takes_sm90(TrtNvfp4LinearArgs const& args);
TRT_NVFP4_OPTIONAL bool takes_sm90(TrtNvfp4MlpArgs const& args);

// True if SM90's own kernels serve such a call on the current GPU at every number of tokens.
TRT_NVFP4_OPTIONAL bool serves_sm90(TrtNvfp4LinearArgs const& args);
TRT_NVFP4_OPTIONAL bool serves_sm90(TrtNvfp4MlpArgs const& args);

// Enough for every m up to args.m, on any GPU; 0 if the call is not served.
TRT_NVFP4_OPTIONAL size_t workspace_bytes(TrtNvfp4LinearArgs const& args);
TRT_NVFP4_OPTIONAL size_t workspace_bytes(TrtNvfp4MlpArgs const& args);

// Tokens go in blocks of kMaxTokens, each of which reads the weights. From sm_90 on the kernel reads weights, their
// scales and biases while the kernel launched before it still runs, so that one must not write them.
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream);
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream);

// Whether the library has them.
inline bool is_linked(TrtNvfp4LinearArgs const&) {
    TrtNvfp4Status (*const function)(TrtNvfp4LinearArgs const&, void*, TrtNvfp4Stream) = launch;
    return function != nullptr;
}
inline bool is_linked(TrtNvfp4MlpArgs const&) {
    TrtNvfp4Status (*const function)(TrtNvfp4MlpArgs const&, void*, TrtNvfp4Stream) = launch;
    return function != nullptr;
}

}  // namespace trt_nvfp4::w4a16
