#pragma once

#include "decoder/launch.h"
#include "decoder/sm80_decoder.cuh"

namespace trt_nvfp4::decoder {

template <class Tile, bool kFp8, int kHeadDim>
DecoderKernel<typename Tile::Element> kernel_of(int m) {
    return {sm80_decoder<Tile, kFp8, kHeadDim>,
            Tile::chunk_bytes(m),
            [](int tokens, int warps) {
                return Attend<typename Tile::Element, kFp8, kHeadDim>::shared_bytes(tokens, warps);
            },
            Attend<typename Tile::Element, kFp8, kHeadDim>::kParts,
            Tile::kFillers,
            !Tile::kShares};
}

template <typename T, bool kFp8, int kHeadDim>
DecoderKernel<T> kernel_of_tokens(int m) {
    if (m == 1) return kernel_of<TokenTile<T>, kFp8, kHeadDim>(m);
    if (m <= 8) return kernel_of<ColumnTile<T, 1>, kFp8, kHeadDim>(m);
    return kernel_of<ColumnTile<T, 2>, kFp8, kHeadDim>(m);
}

template <typename T, bool kFp8>
DecoderKernel<T> find_kernel(int m, int head_dim, bool experts) {
    if (experts) return kernel_of<ExpertTile<T>, kFp8, kLargestHeadOfSeveral>(m);
    if (head_dim <= 64) return kernel_of_tokens<T, kFp8, 64>(m);
    if (head_dim <= kLargestHeadOfSeveral) return kernel_of_tokens<T, kFp8, kLargestHeadOfSeveral>(m);
    return kernel_of<TokenTile<T>, kFp8, kLargestHead>(m);
}

}  // namespace trt_nvfp4::decoder
