// Which kernel family serves a call: the single place where tactic AUTO is resolved and an explicit one is judged.
#pragma once

#include "../api/w4a16.h"
#include "w4a4.h"

namespace trt_nvfp4 {

// The tactic to run. An explicit one is returned as it is: the launcher refuses what it does not know.
template <typename Args>
TrtNvfp4Tactic choose_tactic(Args const& args) {
    if (args.tactic != TRT_NVFP4_TACTIC_AUTO) return args.tactic;
    if (w4a16::serves(args)) return TRT_NVFP4_TACTIC_W4A16;
    // Whatever the number of rows: the generic kernel is the only other one that quantizes activations.
    return choose_w4a4(args);
}

}  // namespace trt_nvfp4
