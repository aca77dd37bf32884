// Launchers of the SM90 W4A16 kernels: sm90_w4a16_linear.cuh behind trtNvfp4Linear, sm90_w4a16_mlp.cuh behind
// trtNvfp4Mlp, sm90_w4a16_moe.cuh behind trtNvfp4Moe.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::sm90 {

#ifdef TRT_NVFP4_SM90
// True if SM90's kernels, not mma.sync's, take a call of tactic W4A16 on the current GPU.
bool takes(TrtNvfp4LinearArgs const& args);
bool takes(TrtNvfp4MlpArgs const& args);
bool takes(TrtNvfp4MoeArgs const& args);

// Whether they could.
bool serves(TrtNvfp4LinearArgs const& args);
bool serves(TrtNvfp4MlpArgs const& args);
bool serves(TrtNvfp4MoeArgs const& args);

// Enough for every m up to args.m; needs no GPU.
size_t workspace_bytes(TrtNvfp4LinearArgs const& args);
size_t workspace_bytes(TrtNvfp4MlpArgs const& args);
size_t workspace_bytes(TrtNvfp4MoeArgs const& args);

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream);
TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream);
TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream);
#else
template <typename Args>
bool takes(Args const&) {
    return false;
}
template <typename Args>
bool serves(Args const&) {
    return false;
}
template <typename Args>
size_t workspace_bytes(Args const&) {
    return 0;
}
template <typename Args>
TrtNvfp4Status launch(Args const&, void*, TrtNvfp4Stream) {
    return TRT_NVFP4_UNSUPPORTED;
}
#endif

}  // namespace trt_nvfp4::sm90
