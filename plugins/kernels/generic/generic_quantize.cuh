// A matrix to NVFP4: packed E2M1, tiled E4M3 block scales with zeroed padding, and the tensor scale. One thread per
// block of 16 values; those of residual channels quantize the block that they follow anew.
#pragma once

#include <algorithm>

#include "formats/nvfp4_matrix.cuh"
#include "formats/quantize_block.cuh"
#include "generic/generic_amax.cuh"

namespace trt_nvfp4 {

constexpr int kQuantizeThreads = 256;

template <typename T>
__global__ __launch_bounds__(kQuantizeThreads) void generic_quantize(T const* x, int64_t m, int64_t k,
                                                                     float const* given_scale, Nvfp4Matrix out) {
    float const tensor_scale = resolve_tensor_scale(*given_scale, out.amax_bits, out.scale_search);
    int64_t const stored = k + out.residual_channels;
    int64_t const blocks_padded = padded_blocks(stored);
    int64_t const index = int64_t{blockIdx.x} * kQuantizeThreads + threadIdx.x;
    if (index == 0) *out.tensor_scale = tensor_scale;

    int64_t const row = index / blocks_padded;
    int64_t const block = index % blocks_padded;
    if (row >= round_up(m, 128)) return;
    uint8_t* const block_scale = out.block_scales + scale_offset(row, block, blocks_padded);
    if (row >= m || block >= stored / kBlock) {
        *block_scale = 0;
        return;
    }

    bool const is_residual = block >= k / kBlock;
    int64_t const start = block * kBlock - (is_residual ? out.residual_channels : 0);
    T const* const source = x + row * k + start;
    float values[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) values[i] = ptx::to_float(source[i]);
    BlockQuantizer quantizer = block_quantizer(values, tensor_scale, out.scale_search);
    if (is_residual) quantizer = residual_quantizer(values, quantizer, tensor_scale, out.scale_search);
    *block_scale = quantizer.block_scale;
    *reinterpret_cast<uint2*>(out.packed + (row * stored + block * kBlock) / 2) = quantizer.encode(values);
}

// `static_scale`: the given scale is known not to be 0.
template <typename T>
TrtNvfp4Status launch_quantize(T const* x, int64_t m, int64_t k, float const* given_scale, bool static_scale,
                               Nvfp4Matrix const& out, cudaStream_t stream) {
    if (!static_scale) TRT_NVFP4_RETURN_IF_ERROR(launch_amax(x, m * k, given_scale, out.amax_bits, stream));
    // At least one block: the tensor scale is an output of an empty matrix too.
    int64_t const scales = scale_bytes(m, k + out.residual_channels);
    int64_t const blocks = std::max<int64_t>((scales + kQuantizeThreads - 1) / kQuantizeThreads, 1);
    return launch_kernel(generic_quantize<T>, static_cast<unsigned>(blocks), kQuantizeThreads, 0, false, stream,
                         "generic_quantize", x, m, k, given_scale, out);
}

}  // namespace trt_nvfp4
