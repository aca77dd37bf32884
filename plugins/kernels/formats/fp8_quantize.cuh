// A matrix to E4M3 under one scale: the given one, or amax / 448 where that is 0, which a kernel of its own finds.
#pragma once

#include <algorithm>

#include "common/programmatic_launch.cuh"
#include "formats/fp8_matrix.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

constexpr int kFp8Threads = 256;
constexpr int kFp8AmaxBlocks = 128;
constexpr int kFp8Vector = 8;  // values at a time; the number of values is a multiple

struct Fp8Quantization {
    float const* given_scale;  // [1]
    uint32_t* block_amax;      // [kFp8AmaxBlocks]; scratch
    uint8_t* values;
    float* scale;      // [1]; the scale used
    uint32_t* zeroed;  // what later kernels want zeroed, on the side
    int64_t zeroed_count;
};

template <typename T>
__device__ __forceinline__ void load_vector(float (&values)[kFp8Vector], T const* x) {
    constexpr int kLoads = kFp8Vector * sizeof(T) / 16;
    uint4 raw[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = reinterpret_cast<uint4 const*>(x)[i];
#pragma unroll
    for (int i = 0; i < kFp8Vector; ++i) values[i] = ptx::to_float(reinterpret_cast<T const*>(raw)[i]);
}

template <typename T>
__global__ __launch_bounds__(kFp8Threads) void fp8_amax(T const* x, int64_t count, Fp8Quantization to) {
    let_next_kernel_start();
    wait_for_kernels_before();
    if (*to.given_scale != 0.0f) return;
    uint32_t largest = 0;
    for (int64_t i = (int64_t{blockIdx.x} * kFp8Threads + threadIdx.x) * kFp8Vector; i < count;
         i += int64_t{kFp8AmaxBlocks} * kFp8Threads * kFp8Vector) {
        float values[kFp8Vector];
        load_vector(values, x + i);
#pragma unroll
        for (float const value : values) largest = max(largest, ptx::magnitude_bits(value));
    }
    __shared__ uint32_t warps[kFp8Threads / 32];
    largest = ptx::warp_max(largest);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (uint32_t const of_warp : warps) largest = max(largest, of_warp);
    to.block_amax[blockIdx.x] = largest;
}

template <typename T>
__global__ __launch_bounds__(kFp8Threads) void fp8_quantize(T const* x, int64_t count, Fp8Quantization to) {
    let_next_kernel_start();
    wait_for_kernels_before();
    float scale = *to.given_scale;
    if (scale == 0.0f) {
        uint32_t amax_bits = 0;
        for (int i = threadIdx.x % 32; i < kFp8AmaxBlocks; i += 32) amax_bits = max(amax_bits, to.block_amax[i]);
        amax_bits = ptx::warp_max(amax_bits);
        scale = Fp8Scale{to.given_scale, &amax_bits}.resolve();
    }
    int64_t const thread = int64_t{blockIdx.x} * kFp8Threads + threadIdx.x;
    if (thread == 0) *to.scale = scale;
    for (int64_t i = thread; i < to.zeroed_count; i += int64_t{gridDim.x} * kFp8Threads) to.zeroed[i] = 0;
    int64_t const first = thread * kFp8Vector;
    if (first >= count) return;
    float values[kFp8Vector];
    load_vector(values, x + first);
    uint2 bytes = make_uint2(0u, 0u);
#pragma unroll
    for (int i = 0; i < kFp8Vector; ++i) {
        uint32_t const byte = ptx::e4m3_encode(__fdiv_rn(values[i], scale));
        (i < 4 ? bytes.x : bytes.y) |= byte << (8 * (i % 4));
    }
    *reinterpret_cast<uint2*>(to.values + first) = bytes;
}

template <typename T>
TrtNvfp4Status launch_fp8_quantize(T const* x, int64_t count, Fp8Quantization const& to, bool static_scale,
                                   bool programmatic, cudaStream_t stream) {
    if (!static_scale) {
        TRT_NVFP4_RETURN_IF_ERROR(
            launch_kernel(fp8_amax<T>, kFp8AmaxBlocks, kFp8Threads, 0, programmatic, stream, "fp8_amax", x, count, to));
    }
    int64_t const per_block = kFp8Threads * kFp8Vector;
    int64_t const blocks = std::max<int64_t>((count + per_block - 1) / per_block, 1);
    return launch_kernel(fp8_quantize<T>, blocks, kFp8Threads, 0, programmatic, stream, "fp8_quantize", x, count, to);
}

}  // namespace trt_nvfp4
