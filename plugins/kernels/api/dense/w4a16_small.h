// Launcher of the W4A16 kernel for small linears (sm80_w4a16_small.cuh), behind api/dense/w4a16.cu.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::w4a16 {

// Of calls that tactic W4A16 serves: whether the kernel takes them, on the current GPU, from those that stream weights.
bool takes_small(TrtNvfp4LinearArgs const& args);
inline bool takes_small(TrtNvfp4MlpArgs const&) { return false; }
inline bool takes_small(TrtNvfp4MoeArgs const&) { return false; }

// Of a linear that it takes. Needs no workspace.
TrtNvfp4Status launch_small(TrtNvfp4LinearArgs const& args, TrtNvfp4Stream stream);
inline TrtNvfp4Status launch_small(TrtNvfp4MlpArgs const&, TrtNvfp4Stream) { return TRT_NVFP4_UNSUPPORTED; }

}  // namespace trt_nvfp4::w4a16
