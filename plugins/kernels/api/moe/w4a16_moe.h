// Launcher of the W4A16 kernels for mixtures of experts (sm80_w4a16_moe.cuh, sm90_w4a16_moe.cuh) behind trtNvfp4Moe.
#pragma once

#include "api/launch.h"

namespace trt_nvfp4::w4a16 {

// Of 16-bit activations that stay 16-bit: every K a multiple of 32; any number of tokens.
TRT_NVFP4_OPTIONAL bool serves(TrtNvfp4MoeArgs const& args);

// True if SM90's own kernel takes a served call's number of tokens on the current GPU.
TRT_NVFP4_OPTIONAL bool takes_sm90(TrtNvfp4MoeArgs const& args);

// True if SM90's own kernel serves such a call on the current GPU at every number of tokens.
TRT_NVFP4_OPTIONAL bool serves_sm90(TrtNvfp4MoeArgs const& args);

// Enough for every m up to args.m, on any GPU; 0 if the call is not served.
TRT_NVFP4_OPTIONAL size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

// Tokens go in blocks, each of which reads the weights of its experts.
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);

// Whether the library has them.
inline bool is_linked(TrtNvfp4MoeArgs const&) {
    TrtNvfp4Status (*const function)(TrtNvfp4MoeArgs const&, void*, TrtNvfp4Stream) = launch;
    return function != nullptr;
}

}  // namespace trt_nvfp4::w4a16
