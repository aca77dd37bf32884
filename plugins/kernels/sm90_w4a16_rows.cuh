// What lies around a projection by sm90_w4a16_gemm.cuh: its tokens become an image, and where its K was split partial
// sums become its outputs.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/element.cuh"
#include "ptx/grid.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm90_w4a16_image.cuh"
#include "smooth_activation.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kRowThreads = 256;

template <typename T>
struct ImageArgs {
    T const* x;  // [m, width]
    uint8_t* image;
    int width, m;
};

// Blocks x, y: a token of the image's, a part of its row.
template <typename T>
__global__ __launch_bounds__(kRowThreads) void sm90_w4a16_image(__grid_constant__ ImageArgs<T> const args) {
    int const token = blockIdx.x;
    ptx::launch_next();
    ptx::await_previous_launch();
    T const* const row = args.x + static_cast<int64_t>(token) * args.width;
    int const units = chunks_of(args.width) * (kChunk / 8);
    for (int unit = blockIdx.y * kRowThreads + threadIdx.x; unit < units; unit += gridDim.y * kRowThreads) {
        __align__(16) T values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const k = pair_k(unit, i / 2) + i % 2 * 4;
            values[i] = token < args.m && k < args.width ? row[k] : ptx::from_float<T>(0.0f);
        }
        reinterpret_cast<uint4*>(args.image)[static_cast<int64_t>(unit) * gridDim.x + token] =
            *reinterpret_cast<uint4 const*>(values);
    }
}

template <typename T>
struct SumArgs {
    float const* partials;  // [splits, tokens, pitch]
    int splits, tokens, pitch;
    int rows;
    float const* tensor_scale;
    T const* bias;
    TrtNvfp4Activation activation;
    T* y;  // [m, rows]
};

// The projection's outputs `row` to `row + 7` of a token, before bias and activation.
template <typename T>
__device__ __forceinline__ void sum_partials(SumArgs<T> const& args, int token, int row, float (&sums)[8]) {
    constexpr int kBatch = 16;  // as many trips to L2 at once
    float const* const first = args.partials + static_cast<int64_t>(token) * args.pitch + row;
    int64_t const step = static_cast<int64_t>(args.tokens) * args.pitch;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
    for (int begin = 0; begin < args.splits; begin += kBatch) {
        float4 parts[kBatch][2] = {};
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            if (begin + j >= args.splits) continue;
            auto const* const source = reinterpret_cast<float4 const*>(first + (begin + j) * step);
            parts[j][0] = __ldcg(source);
            parts[j][1] = __ldcg(source + 1);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            float const* const values = reinterpret_cast<float const*>(parts[j]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += values[i];
        }
    }
}

// Blocks x, y: a token, a part of its row.
template <typename T>
__global__ __launch_bounds__(kRowThreads) void sm90_w4a16_sum(__grid_constant__ SumArgs<T> const args) {
    int const token = blockIdx.x;
    ptx::launch_next();
    ptx::await_previous_launch();
    float const scale = *args.tensor_scale * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
    T* const y = args.y + static_cast<int64_t>(token) * args.rows;
    for (int first = (blockIdx.y * kRowThreads + threadIdx.x) * 8; first < args.rows;
         first += gridDim.y * kRowThreads * 8) {
        float values[8];
        sum_partials(args, token, first, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] = fmaf(values[i], scale, first + i < args.rows ? ptx::to_float(args.bias[first + i]) : 0.0f);
        }
        activate_values(args.activation, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (first + i < args.rows) y[first + i] = ptx::from_float<T>(values[i]);
        }
    }
}

}  // namespace trt_nvfp4::sm90
