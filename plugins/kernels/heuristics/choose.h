// Which kernel family serves a call: the single place where tactic AUTO is resolved and an explicit one is judged.
#pragma once

#include "../api/trt_nvfp4.h"

namespace trt_nvfp4 {

// The tactic to run. An explicit one is returned as it is: the launcher refuses what it does not know.
template <typename Args>
TrtNvfp4Tactic choose_tactic(Args const& args) {
    return args.tactic == TRT_NVFP4_TACTIC_AUTO ? TRT_NVFP4_TACTIC_GENERIC : args.tactic;
}

}  // namespace trt_nvfp4
