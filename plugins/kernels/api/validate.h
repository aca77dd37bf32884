// Argument checks that the launchers share. Each records what was expected and what was found.
#pragma once

#include <string>

#include "launch.h"

namespace trt_nvfp4 {

inline int64_t element_size(TrtNvfp4DataType dtype) { return dtype == TRT_NVFP4_FLOAT32 ? 4 : 2; }

inline TrtNvfp4Status require(bool condition, std::string const& message) {
    return condition ? TRT_NVFP4_SUCCESS : record_error(TRT_NVFP4_INVALID_ARGUMENT, message);
}

inline TrtNvfp4Status require_rows(std::string const& op, int64_t m) {
    return require(m >= 0, op + ": the number of rows is " + std::to_string(m));
}

inline TrtNvfp4Status require_blocks(std::string const& what, int64_t k) {
    return require(k > 0 && k % 16 == 0,
                   what + " must be a positive multiple of 16 (one block scale), it is " + std::to_string(k));
}

inline TrtNvfp4Status require_activation(std::string const& op, TrtNvfp4Activation activation, bool gated) {
    int const last = gated ? TRT_NVFP4_SWIGLU_CLAMPED : TRT_NVFP4_GELU_QUICK;
    return require(activation >= 0 && activation <= last, op + ": activation must be 0 to " + std::to_string(last) +
                                                              ", it is " +
                                                              std::to_string(static_cast<int>(activation)));
}

inline TrtNvfp4Status require_workspace(std::string const& op, size_t needed, size_t given) {
    return require(given >= needed, op + ": the workspace holds " + std::to_string(given) + " bytes, " +
                                        std::to_string(needed) + " are needed");
}

inline TrtNvfp4Status unsupported_tactic(std::string const& op, TrtNvfp4Tactic tactic) {
    return record_error(TRT_NVFP4_UNSUPPORTED,
                        op + ": tactic " + std::to_string(static_cast<int>(tactic)) + " cannot serve this call");
}

}  // namespace trt_nvfp4
