// Residual, RMSNorm and NVFP4 in one pass over x: a block keeps a row in shared memory. Same arithmetic in the same
// order as generic_rmsnorm and generic_quantize, so the same bits.
//
// Where the tensor scale has to be found, the pass leaves every row's amax instead, and a second one starts from r;
// where it is given, which only the device knows, the second returns at once.
#pragma once

#include <algorithm>

#include "nvfp4_matrix.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "quantize_block.cuh"

namespace trt_nvfp4 {

constexpr int kFusedQuantizeThreads = 256;
constexpr int64_t kFusedQuantizeRowBytes = 47 * 1024;  // what a block may have without asking for more

template <typename T>
struct FusedQuantizeArgs {
    int64_t m, k;
    T const* x;
    T const* residual;     // null: none
    T const* norm_weight;  // null: no norm
    float epsilon;
    T* r;
    float const* given_scale;
    uint32_t* row_amax;  // [m], scratch
    Nvfp4Matrix out;     // its amax_bits is not used
    bool second;
};

// Largest of a block's values; every thread gets it.
__device__ __forceinline__ uint32_t block_max(uint32_t x) {
    __shared__ uint32_t partial[kFusedQuantizeThreads / 32];
    x = ptx::warp_max(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    uint32_t largest = 0;
    for (uint32_t const part : partial) largest = max(largest, part);
    return largest;
}

// x + residual, or in the second pass r, to shared memory; then the norm.
template <typename T>
__device__ __forceinline__ void load_row(FusedQuantizeArgs<T> const& args, int64_t row, T* values) {
    constexpr int kWidth = 16 / sizeof(T);
    T const* const source = (args.second ? args.r : args.x) + row * args.k;
    for (int64_t i = threadIdx.x * kWidth; i < args.k; i += kFusedQuantizeThreads * kWidth) {
        uint4 word = *reinterpret_cast<uint4 const*>(source + i);
        if (!args.second) {
            if (args.residual != nullptr) {
                uint4 const other = *reinterpret_cast<uint4 const*>(args.residual + row * args.k + i);
                T* const a = reinterpret_cast<T*>(&word);
                T const* const b = reinterpret_cast<T const*>(&other);
#pragma unroll
                for (int j = 0; j < kWidth; ++j) a[j] = ptx::from_float<T>(ptx::to_float(a[j]) + ptx::to_float(b[j]));
            }
            *reinterpret_cast<uint4*>(args.r + row * args.k + i) = word;
        }
        *reinterpret_cast<uint4*>(values + i) = word;
    }
    __syncthreads();
    if (args.norm_weight == nullptr) return;
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
        squares += ptx::to_float(values[i]) * ptx::to_float(values[i]);
    }
    float const mean = ptx::block_sum<kFusedQuantizeThreads>(squares) / static_cast<float>(args.k);
    float const inverse_rms = __frcp_rn(__fsqrt_rn(mean + args.epsilon));
    for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
        values[i] = ptx::from_float<T>(ptx::to_float(values[i]) * inverse_rms * ptx::to_float(args.norm_weight[i]));
    }
    __syncthreads();
}

template <typename T>
__global__ __launch_bounds__(kFusedQuantizeThreads) void fused_quantize(
    __grid_constant__ FusedQuantizeArgs<T> const args) {
    extern __shared__ __align__(16) uint8_t fused_quantize_row[];
    T* const values = reinterpret_cast<T*>(fused_quantize_row);
    int64_t const row = blockIdx.x;
    float const given = *args.given_scale;
    bool const found = given != 0.0f;
    if (args.second && found) return;
    if (row < args.m) load_row(args, row, values);
    int const blocks = static_cast<int>(args.k / kBlock);
    if (!args.second && !found) {
        if (row >= args.m) return;
        uint32_t amax = 0;
        for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
            amax = max(amax, ptx::magnitude_bits(ptx::to_float(values[i])));
        }
        amax = block_max(amax);
        if (threadIdx.x == 0) args.row_amax[row] = amax;
        return;
    }
    uint32_t amax = 0;
    if (!found) {
        for (int64_t i = threadIdx.x; i < args.m; i += kFusedQuantizeThreads) amax = max(amax, args.row_amax[i]);
        amax = block_max(amax);
    }
    float const tensor_scale = resolve_tensor_scale(given, &amax);
    if (row == 0 && threadIdx.x == 0) *args.out.tensor_scale = tensor_scale;
    if (row >= round_up(args.m, 128)) return;
    int const blocks_padded = static_cast<int>(padded_blocks(args.k));
    for (int block = threadIdx.x; block < blocks_padded; block += kFusedQuantizeThreads) {
        uint8_t* const block_scale = args.out.block_scales + scale_offset(row, block, blocks_padded);
        if (row >= args.m || block >= blocks) {
            *block_scale = 0;
            continue;
        }
        float sixteen[kBlock];
        uint32_t block_amax = 0;
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            sixteen[i] = ptx::to_float(values[block * kBlock + i]);
            block_amax = max(block_amax, ptx::magnitude_bits(sixteen[i]));
        }
        BlockQuantizer const quantizer(block_amax, tensor_scale);
        uint2 codes = make_uint2(0u, 0u);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes.x |= quantizer.encode(sixteen[i]) << (4 * i);
            codes.y |= quantizer.encode(sixteen[8 + i]) << (4 * i);
        }
        *block_scale = quantizer.block_scale;
        *reinterpret_cast<uint2*>(args.out.packed + (row * args.k + block * kBlock) / 2) = codes;
    }
}

template <typename T>
TrtNvfp4Status launch_fused_quantize(FusedQuantizeArgs<T> args, cudaStream_t stream) {
    // At least one block: the tensor scale is an output of an empty matrix too.
    auto const rows = static_cast<unsigned>(std::max<int64_t>(round_up(args.m, 128), 1));
    for (bool const second : {false, true}) {
        args.second = second;
        fused_quantize<<<rows, kFusedQuantizeThreads, static_cast<size_t>(args.k) * sizeof(T), stream>>>(args);
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetLastError(), "fused_quantize"));
    }
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4
