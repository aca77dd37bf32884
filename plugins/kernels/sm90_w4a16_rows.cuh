// What lies between two projections: a block takes a token's row, from x or from the partial sums of a projection whose
// K was split, and writes it as T, as an image for the next projection (sm90_w4a16_image.cuh), or both.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/element.cuh"
#include "ptx/grid.cuh"
#include "ptx/reduce.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm90_w4a16_image.cuh"
#include "smooth_activation.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kRowThreads = 256;

template <typename T>
struct RowArgs {
    int width, m;
    T const* x;  // [m, width]; null: partial sums
    // Of partial sums: row r of the projection, or with gates rows 2 r and 2 r + 1, make value r.
    float const* partials;  // [splits, tokens, pitch]
    int splits, pitch;
    float const* tensor_scale;
    T const* bias;
    TrtNvfp4Activation activation;
    bool gated;
    float alpha, limit;
    T const* residual;     // [m, width], added last; null: none. May be y itself.
    T* y;                  // [m, width]; null: not wanted
    uint8_t* image;        // null: not wanted
    T const* norm_weight;  // [width], of an RMSNorm in front of the image; null: none
    float epsilon;
};

// The projection's outputs `row` to `row + 7` of a token, before bias and activation.
template <typename T>
__device__ __forceinline__ void sum_partials(RowArgs<T> const& args, int token, int tokens, int row, float (&sums)[8]) {
    constexpr int kBatch = 16;  // as many trips to L2 at once
    float const* const first = args.partials + static_cast<int64_t>(token) * args.pitch + row;
    int64_t const step = static_cast<int64_t>(tokens) * args.pitch;
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

// Blocks x, y: a token of the image's; a part of its row, all of it where there is a norm. The row lies in dynamic
// shared memory as T.
template <typename T>
__global__ __launch_bounds__(kRowThreads) void sm90_w4a16_rows(__grid_constant__ RowArgs<T> const args) {
    extern __shared__ __align__(128) uint8_t bytes[];
    T* const row = reinterpret_cast<T*>(bytes);
    int const token = blockIdx.x;
    int const tokens = gridDim.x;
    int const part_chunks = (chunks_of(args.width) + gridDim.y - 1) / gridDim.y;
    int const begin = blockIdx.y * part_chunks * kChunk;
    int const end = min(begin + part_chunks * kChunk, chunks_of(args.width) * kChunk);
    int const width_end = min(end, args.width);
    ptx::launch_next();
    ptx::await_previous_launch();

    int64_t const at = static_cast<int64_t>(token) * args.width;
    float squares = 0.0f;
    auto const keep = [&](int i, float value) {
        if (args.residual != nullptr) value += ptx::to_float(args.residual[at + i]);
        T const rounded = ptx::from_float<T>(value);
        row[i] = rounded;
        if (args.y != nullptr) args.y[at + i] = rounded;
        squares = fmaf(ptx::to_float(rounded), ptx::to_float(rounded), squares);
    };
    if (token < args.m && args.x != nullptr) {
        for (int i = begin + threadIdx.x; i < width_end; i += kRowThreads) keep(i, ptx::to_float(args.x[at + i]));
    } else if (token < args.m) {
        int const per_value = args.gated ? 2 : 1;
        int const rows = width_end * per_value;
        float const scale = *args.tensor_scale * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
        for (int first = begin * per_value + threadIdx.x * 8; first < rows; first += kRowThreads * 8) {
            float values[8];
            sum_partials(args, token, tokens, first, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = fmaf(values[i], scale, first + i < rows ? ptx::to_float(args.bias[first + i]) : 0.0f);
            }
            int const width = 8 / per_value;
            if (args.gated) {
                gate_eight(args.activation, args.alpha, args.limit, values);
            } else {
                activate_eight(args.activation, values);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < width && first / per_value + i < width_end) keep(first / per_value + i, values[i]);
            }
        }
    }
    if (args.image == nullptr) return;
    float inverse_rms = 1.0f;
    if (args.norm_weight != nullptr) {
        float const total = ptx::block_sum<kRowThreads>(squares);
        inverse_rms = 1.0f / sqrtf(total / static_cast<float>(args.width) + args.epsilon);
    }
    __syncthreads();
    for (int unit = begin / 8 + threadIdx.x; unit < end / 8; unit += kRowThreads) {
        __align__(16) T values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const k = pair_k(unit, i / 2) + i % 2 * 4;
            values[i] = token < args.m && k < args.width ? row[k] : ptx::from_float<T>(0.0f);
            if (args.norm_weight != nullptr && k < args.width) {
                values[i] =
                    ptx::from_float<T>(ptx::to_float(values[i]) * inverse_rms * ptx::to_float(args.norm_weight[k]));
            }
        }
        reinterpret_cast<uint4*>(args.image)[static_cast<int64_t>(unit) * tokens + token] =
            *reinterpret_cast<uint4 const*>(values);
    }
}

}  // namespace trt_nvfp4::sm90
