// The 128x4 tiled order of block scales that the tensor cores read: 512-byte tiles of 128 rows by 4 blocks, zero
// padded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trt_nvfp4 {

constexpr int kBlock = 16;  // values per block scale

__host__ __device__ constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

__host__ __device__ constexpr int64_t padded_blocks(int64_t k) { return round_up(k / kBlock, 4); }

__host__ __device__ constexpr int64_t scale_bytes(int64_t rows, int64_t k) {
    return round_up(rows, 128) * padded_blocks(k);
}

__host__ __device__ constexpr int64_t scale_offset(int64_t row, int64_t block, int64_t blocks_padded) {
    return ((row / 128) * (blocks_padded / 4) + block / 4) * 512 + (row % 32) * 16 + (row % 128 / 32) * 4 + block % 4;
}

}  // namespace trt_nvfp4
