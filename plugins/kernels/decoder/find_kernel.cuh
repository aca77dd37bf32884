#pragma once

#include "decoder/launch.h"
#include "decoder/sm80_decoder.cuh"

namespace trt_nvfp4::decoder {

template <class Tile, bool kFp8, int kHeadDim, class MlpTile = Tile>
DecoderKernel<typename Tile::Element> kernel_of(int m) {
    return {sm80_decoder<Tile, MlpTile, kFp8, kHeadDim>, Tile::chunk_bytes(m),
            [](int tokens, int warps) {
                return Attend<typename Tile::Element, kFp8, kHeadDim>::shared_bytes(tokens, warps);
            },
            Attend<typename Tile::Element, kFp8, kHeadDim>::kParts, !Tile::kShares};
}

// Not each number of tokens and size of heads has a kernel of its own: these take a minute to compile.
template <typename T, bool kFp8>
DecoderKernel<T> find_kernel(int m, int head_dim, bool experts) {
    using Several = ColumnTile<T, 2>;
    if (experts && m == 1) return kernel_of<ExpertTile<T>, kFp8, kLargestHeadOfExperts>(m);
    if (experts) return kernel_of<Several, kFp8, kLargestHeadOfExperts, ExpertTile<T>>(m);
    if (m == 1 && head_dim <= 64) return kernel_of<TokenTile<T>, kFp8, 64>(m);
    if (m == 1 && head_dim <= 128) return kernel_of<TokenTile<T>, kFp8, 128>(m);
    if (m == 1) return kernel_of<TokenTile<T>, kFp8, kLargestHead>(m);
    if (head_dim > 128) return kernel_of<Several, kFp8, kLargestHead>(m);
    return m <= 8 ? kernel_of<ColumnTile<T, 1>, kFp8, 128>(m) : kernel_of<Several, kFp8, 128>(m);
}

}  // namespace trt_nvfp4::decoder
