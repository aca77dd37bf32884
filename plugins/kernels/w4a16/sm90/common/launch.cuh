// What the launchers of the SM90 W4A16 kernels share.
#pragma once

#include <algorithm>
#include <type_traits>

#include "api/launch.h"
#include "device/sm_count.h"
#include "heuristics/sm90_w4a16.h"

namespace trt_nvfp4::sm90 {

inline bool gpu_is_sm90() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

// SMs that kernels in a stream use.
inline TrtNvfp4Status read_used_sms(cudaStream_t stream, int& sms) {
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, sms));
    sms = std::min(sms, kMostSms);
    return TRT_NVFP4_SUCCESS;
}

// Tokens that the kernel for `m` tokens of a linear or an MLP is compiled for.
inline int tokens_of(int64_t m) { return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : kMaxTokens; }

// Calls f with tokens_of(m) as a compile-time constant.
template <typename F>
TrtNvfp4Status with_tokens(int64_t m, F&& f) {
    switch (tokens_of(m)) {
        case 8:
            return f(std::integral_constant<int, 8>());
        case 16:
            return f(std::integral_constant<int, 16>());
        case 32:
            return f(std::integral_constant<int, 32>());
        default:
            return f(std::integral_constant<int, kMaxTokens>());
    }
}

// Partial sums of a projection at the most splits that choose_split may take.
inline int64_t most_partials(int64_t rows, int tokens) {
    int const padded = padded_rows(static_cast<int>(rows), kMaxCluster);
    return int64_t{tokens} * padded * std::clamp(kMaxSplitRows / padded, 1, kMaxSplits);
}

}  // namespace trt_nvfp4::sm90
