// Tensor maps of NVFP4 weights, for the copy engine, and projections, which have them.
#pragma once

#include "api/launch.h"
#include "device/tensor_map.h"
#include "w4a16/sm90/mlp/rows.cuh"

namespace trt_nvfp4::sm90 {

// What L2 reads beside a box whose rows end within lines of memory: the next box has the rest of these. Where blocks
// hand each other activations all the time, those wait behind what is read ahead; mixtures rarely do.
constexpr CUtensorMapL2promotion kBoxAlone = CU_TENSOR_MAP_L2_PROMOTION_NONE;
constexpr CUtensorMapL2promotion kReadAhead = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

inline TrtNvfp4Status encode(CUtensorMap& map, CUtensorMapDataType type, int rank, void const* data,
                             cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
    return encode_tensor_map(map, type, rank, data, sizes, strides, box, swizzle, promotion, "tactic W4A16_MMA_SYNC");
}

inline TrtNvfp4Status encode(WeightMaps& maps, TrtNvfp4Weight const& weight, int64_t layers, int64_t rows, int64_t k,
                             CUtensorMapL2promotion within_lines) {
    int64_t const groups = scale_bytes(rows, k) / (padded_blocks(k) * kGroupRows);
    maps.rows = static_cast<int>(rows);
    maps.groups = static_cast<int>(groups);
    maps.whole_lines = k % kChunk == 0;
    CUtensorMapL2promotion const promotion = maps.whole_lines ? kBoxAlone : within_lines;
    cuuint64_t const code_sizes[] = {static_cast<cuuint64_t>(k / 2), static_cast<cuuint64_t>(layers * rows)};
    cuuint64_t const code_strides[] = {static_cast<cuuint64_t>(k / 2)};
    cuuint32_t const code_box[] = {kChunk / 2, kGroupRows};
    TRT_NVFP4_RETURN_IF_ERROR(encode(maps.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, weight.packed, code_sizes,
                                     code_strides, code_box, CU_TENSOR_MAP_SWIZZLE_128B, promotion));
    constexpr int kScaleTile = kGroupRows * 4;
    cuuint64_t const tiles = static_cast<cuuint64_t>(padded_blocks(k) / 4);
    cuuint64_t const scale_sizes[] = {kScaleTile / 4, tiles, static_cast<cuuint64_t>(layers * groups)};
    cuuint64_t const scale_strides[] = {kScaleTile, kScaleTile * tiles};
    cuuint32_t const scale_box[] = {kScaleTile / 4, kChunk / kGroup, 1};
    return encode(maps.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32, 3, weight.block_scales, scale_sizes, scale_strides,
                  scale_box, CU_TENSOR_MAP_SWIZZLE_NONE, promotion);
}

// `layers` projections, or experts.
template <typename T>
TrtNvfp4Status make_projection(Projection<T>& projection, TrtNvfp4Weight const& weight, int64_t layers, int64_t rows,
                               int64_t k, CUtensorMapL2promotion within_lines) {
    TRT_NVFP4_RETURN_IF_ERROR(encode(projection.maps, weight, layers, rows, k, within_lines));
    projection.tensor_scale = weight.tensor_scale;
    projection.bias = static_cast<T const*>(weight.bias);
    projection.rows = static_cast<int>(rows);
    projection.k = static_cast<int>(k);
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4::sm90
