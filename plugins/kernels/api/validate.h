// Argument checks that the launchers share. Each records what was expected and what was found.
#pragma once

#include <string>

#include "api/launch.h"

namespace trt_nvfp4 {

inline int64_t element_size(TrtNvfp4DataType dtype) { return dtype == TRT_NVFP4_FLOAT32 ? 4 : 2; }

// Messages are put together on failure only: these checks run on every enqueue.
inline TrtNvfp4Status require(bool condition, char const* message) {
    return condition ? TRT_NVFP4_SUCCESS : record_error(TRT_NVFP4_INVALID_ARGUMENT, message);
}

inline TrtNvfp4Status require_rows(char const* op, int64_t m) {
    if (m >= 0) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_INVALID_ARGUMENT, std::string(op) + ": the number of rows is " + std::to_string(m));
}

inline TrtNvfp4Status require_positive(char const* what, int64_t value) {
    if (value > 0) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_INVALID_ARGUMENT,
                        std::string(what) + " must be positive, it is " + std::to_string(value));
}

inline TrtNvfp4Status require_blocks(char const* what, int64_t k) {
    if (k > 0 && k % 16 == 0) return TRT_NVFP4_SUCCESS;
    return record_error(
        TRT_NVFP4_INVALID_ARGUMENT,
        std::string(what) + " must be a positive multiple of 16 (one block scale), it is " + std::to_string(k));
}

inline TrtNvfp4Status require_activation(char const* op, TrtNvfp4Activation activation, bool gated) {
    int const last = gated ? TRT_NVFP4_SILU_CLAMPED : TRT_NVFP4_GELU_QUICK;
    if (activation >= 0 && activation <= last) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_INVALID_ARGUMENT, std::string(op) + ": activation must be 0 to " +
                                                        std::to_string(last) + ", it is " +
                                                        std::to_string(static_cast<int>(activation)));
}

inline TrtNvfp4Status require_scale_search(char const* op, int32_t scale_search) {
    if (scale_search >= 0 && scale_search <= 2) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_INVALID_ARGUMENT,
                        std::string(op) + ": scale_search must be 0 to 2, it is " + std::to_string(scale_search));
}

// `k`: the channels of what is quantized.
inline TrtNvfp4Status require_residual(char const* op, int32_t channels, bool quantizes, int64_t k) {
    if (channels == 0 || (channels > 0 && channels <= 64 && channels % 16 == 0 && channels <= k && quantizes)) {
        return TRT_NVFP4_SUCCESS;
    }
    return record_error(TRT_NVFP4_INVALID_ARGUMENT,
                        std::string(op) + ": residual_channels must be 0 or, of activations in NVFP4, 16, 32, 48 or " +
                            "64, and at most K = " + std::to_string(k) + ", it is " + std::to_string(channels));
}

inline TrtNvfp4Status require_workspace(char const* op, size_t needed, size_t given) {
    if (given >= needed) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_INVALID_ARGUMENT, std::string(op) + ": the workspace holds " + std::to_string(given) +
                                                        " bytes, " + std::to_string(needed) + " are needed");
}

// `linked`: whether the kernels that a call may need at some shape have an address (TRT_NVFP4_OPTIONAL).
inline TrtNvfp4Status require_linked(char const* op, bool linked, char const* kernels) {
    if (linked) return TRT_NVFP4_SUCCESS;
    return record_error(
        TRT_NVFP4_UNSUPPORTED,
        std::string(op) + ": the kernels " + kernels +
            " were not linked into this plugin library; build the engine again, or with --set all-kernels=yes");
}

inline TrtNvfp4Status unsupported_tactic(char const* op, TrtNvfp4Tactic tactic) {
    return record_error(
        TRT_NVFP4_UNSUPPORTED,
        std::string(op) + ": tactic " + std::to_string(static_cast<int>(tactic)) + " cannot serve this call");
}

}  // namespace trt_nvfp4
