// Launcher of the W4A16 kernel for small linears (sm80_w4a16_small.cuh), behind api/dense/w4a16.cu.
#pragma once

#include "api/launch.h"

namespace trt_nvfp4::w4a16 {

// True if the kernel, not those that stream weights, takes a call of tactic W4A16 on the current GPU.
TRT_NVFP4_OPTIONAL bool takes_small(TrtNvfp4LinearArgs const& args);
inline bool takes_small(TrtNvfp4MlpArgs const&) { return false; }
inline bool takes_small(TrtNvfp4MoeArgs const&) { return false; }

// Launches a linear that takes_small() accepts. Needs no workspace.
TrtNvfp4Status launch_small(TrtNvfp4LinearArgs const& args, TrtNvfp4Stream stream);
inline TrtNvfp4Status launch_small(TrtNvfp4MlpArgs const&, TrtNvfp4Stream) { return TRT_NVFP4_UNSUPPORTED; }

}  // namespace trt_nvfp4::w4a16
