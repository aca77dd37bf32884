// A matrix in NVFP4 on the device: packed E2M1 [rows, k/2], tiled E4M3 block scales, one float32 tensor scale.
#pragma once

#include <algorithm>

#include "api/launch.h"
#include "formats/scale_layout.cuh"

namespace trt_nvfp4 {

struct Nvfp4Rows {
    uint8_t const* packed;
    uint8_t const* block_scales;
    float const* tensor_scale;
};

struct Nvfp4Matrix {
    uint8_t* packed;
    uint8_t* block_scales;
    float* tensor_scale;
    uint32_t* amax_bits;   // [rows, at least 1]; scratch of the quantization
    int32_t scale_search;  // which block scales the quantization tries
    // So many last channels of what is quantized are followed by what NVFP4 loses of them, in NVFP4: rows have as many
    // more values.
    int32_t residual_channels;

    Nvfp4Rows rows() const { return {packed, block_scales, tensor_scale}; }
};

// Layer `layer` of a dense stack of [rows, k] weights.
inline Nvfp4Rows weight_rows(TrtNvfp4Weight const& weight, int64_t rows, int64_t k, int64_t layer) {
    return {static_cast<uint8_t const*>(weight.packed) + layer * (rows * k / 2),
            static_cast<uint8_t const*>(weight.block_scales) + layer * scale_bytes(rows, k),
            weight.tensor_scale + layer};
}

// For rows of `k` values; of an op's arguments the search and the residual channels are taken.
template <typename Args>
Nvfp4Matrix take_nvfp4_matrix(Workspace& workspace, int64_t m, int64_t k, Args const& args) {
    Nvfp4Matrix matrix{};
    int64_t const stored = k + args.residual_channels;
    matrix.packed = workspace.take<uint8_t>(m * stored / 2);
    matrix.block_scales = workspace.take<uint8_t>(scale_bytes(m, stored));
    matrix.tensor_scale = workspace.take<float>(1);
    matrix.amax_bits = workspace.take<uint32_t>(std::max<int64_t>(m, 1));
    matrix.scale_search = args.scale_search;
    matrix.residual_channels = args.residual_channels;
    return matrix;
}

}  // namespace trt_nvfp4
