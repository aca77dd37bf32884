// What the launchers of the SM90 W4A16 kernels share.
#pragma once

#include <algorithm>

#include "api/launch.h"
#include "sm90_w4a16_gemm.cuh"

namespace trt_nvfp4::sm90 {

inline bool gpu_is_sm90() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

template <typename T>
GemmArgs<T> make_gemm(TrtNvfp4Weight const& weight, int64_t rows, int64_t k, int64_t m, int64_t layer = 0) {
    GemmArgs<T> gemm{};
    gemm.codes = static_cast<uint8_t const*>(weight.packed) + layer * (rows * k / 2);
    gemm.scales = static_cast<uint8_t const*>(weight.block_scales) + layer * scale_bytes(rows, k);
    gemm.tensor_scale = weight.tensor_scale + layer;
    gemm.bias = static_cast<T const*>(weight.bias) + layer * rows;
    gemm.rows = static_cast<int>(rows);
    gemm.k = static_cast<int>(k);
    gemm.m = static_cast<int>(m);
    gemm.one = 1;
    return gemm;
}

// Partial sums of a projection at the most splits that choose_split may take.
inline int64_t most_partials(int64_t rows, int tokens) {
    int const padded = padded_rows(static_cast<int>(rows), kMaxCluster);
    return int64_t{tokens} * padded * std::clamp(kMaxSplitRows / padded, 1, kMaxSplits);
}

}  // namespace trt_nvfp4::sm90
