// Rows of pairs (moe_pairs.cuh) in E4M3.
#pragma once

#include "formats/fp8_matrix.cuh"
#include "moe/moe_pairs.cuh"
#include "ptx/e4m3.cuh"

namespace trt_nvfp4 {

struct Fp8PairRows {
    int tile_rows;
    Fp8Scale given;
    uint8_t* values;

    __device__ __forceinline__ float scale() const { return given.resolve(); }
    __device__ __forceinline__ void keep(float) const {}
    __device__ __forceinline__ static int blocks(int64_t hidden) { return static_cast<int>(hidden / kPairBlock); }

    template <typename T>
    __device__ __forceinline__ void store(PairInput<T> const& input, int64_t pair, int64_t row, int64_t block,
                                          float scale) const {
        float x[kPairBlock];
        input.load(x, pair, block);
        uint32_t words[kPairBlock / 4]{};
#pragma unroll
        for (int i = 0; i < kPairBlock; ++i) {
            words[i / 4] |= static_cast<uint32_t>(ptx::e4m3_encode(__fdiv_rn(x[i], scale))) << (8 * (i % 4));
        }
        *reinterpret_cast<uint4*>(values + row * input.hidden + block * kPairBlock) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
};

}  // namespace trt_nvfp4
