// Running sums of a chunk's decays, which are logarithms.
#pragma once

#include "ptx/element.cuh"
#include "recurrent/launch.h"

namespace trt_nvfp4::recurrent {

// exp() of less is nothing beside any other term, and running sums keep their precision.
constexpr float kLeastDecay = -80.0f;

// A lane's two decays of a chunk of `count` tokens.
template <typename T>
__device__ __forceinline__ float2 load_decays(Args<T> const& args, int batch, int head, int token0, int count) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int const token = threadIdx.x % 32 * 2 + i;
        float decay = 0.0f;
        if (args.decay_dim > 0 && token < count) {
            decay = ptx::to_float(args.decay[args.row(batch, token0 + token, head, 1)]);
        }
        pair[i] = decay < kLeastDecay ? kLeastDecay : decay;  // NaN stays
    }
    return {pair[0], pair[1]};
}

// Running sums of a warp's pairs.
__device__ __forceinline__ void sum_decays(float2 pair, float* decays) {
    int const lane = threadIdx.x % 32;
    float const both = pair.x + pair.y;
    float sum = both;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        float const before = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += before;
    }
    decays[2 * lane] = sum - both + pair.x;
    decays[2 * lane + 1] = sum;
}

// exp(later - earlier) of running sums of logarithms.
__device__ __forceinline__ float decay_between(float later, float earlier) { return __expf(later - earlier); }

}  // namespace trt_nvfp4::recurrent
