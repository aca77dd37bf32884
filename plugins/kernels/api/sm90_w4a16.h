// Launchers of the SM90 W4A16 kernels (sm90_w4a16_gemm.cuh, sm90_w4a16_mlp.cuh) behind trtNvfp4Linear and trtNvfp4Mlp.
#pragma once

#include "trt_nvfp4.h"

namespace trt_nvfp4::sm90 {

#ifdef TRT_NVFP4_SM90
// Whether the current GPU and the shape are theirs, of calls that tactic W4A16 serves.
bool serves(TrtNvfp4LinearArgs const& args);
bool serves(TrtNvfp4MlpArgs const& args);

// Enough for every m up to args.m; needs no GPU.
size_t workspace_bytes(TrtNvfp4LinearArgs const& args);
size_t workspace_bytes(TrtNvfp4MlpArgs const& args);

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream);
TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream);

// An MLP in one launch, from 1 token on.
bool serves_resident(TrtNvfp4MlpArgs const& args);
size_t resident_workspace_bytes(TrtNvfp4MlpArgs const& args);
TrtNvfp4Status launch_resident(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream);
#else
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
inline bool serves_resident(TrtNvfp4MlpArgs const&) { return false; }
inline size_t resident_workspace_bytes(TrtNvfp4MlpArgs const&) { return 0; }
inline TrtNvfp4Status launch_resident(TrtNvfp4MlpArgs const&, void*, TrtNvfp4Stream) { return TRT_NVFP4_UNSUPPORTED; }
#endif

// A linear is one launch anyway.
inline bool serves_resident(TrtNvfp4LinearArgs const&) { return false; }
inline TrtNvfp4Status launch_resident(TrtNvfp4LinearArgs const&, void*, TrtNvfp4Stream) {
    return TRT_NVFP4_UNSUPPORTED;
}

}  // namespace trt_nvfp4::sm90
