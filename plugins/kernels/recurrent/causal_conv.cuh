// Causal depthwise convolution with a state, in float32. A warp, or where there are few tokens a thread, has a channel
// of a sequence to itself: it reads what it needs of the past state before it writes the present one, which may be the
// same.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"

namespace trt_nvfp4::recurrent {

constexpr int kConvThreads = 128;

template <typename T>
struct ConvArgs {
    int64_t rows;  // channels of all sequences
    int channels, tokens, width;
    bool silu;
    T const* x;
    T const* weight;
    T const* bias;  // null: zeros
    T const* past;  // null: zeros
    T* y;
    T* present;
};

// kLanes threads share a row.
template <typename T, int kLanes>
__global__ __launch_bounds__(kConvThreads) void causal_conv(ConvArgs<T> args) {
    wait_for_kernels_before();
    int64_t const row = (int64_t{blockIdx.x} * kConvThreads + threadIdx.x) / kLanes;
    if (row >= args.rows) return;
    int const lane = threadIdx.x % kLanes, held = args.width - 1;
    auto const channel = static_cast<int>(row % args.channels);
    T const* const x = args.x + row * args.tokens;
    T const* const weight = args.weight + int64_t{channel} * args.width;
    // A value of the row with the past state in front; `place` counts from there.
    auto const padded = [&](int place) {
        if (place >= held) return ptx::to_float(x[place - held]);
        return args.past == nullptr ? 0.0f : ptx::to_float(args.past[row * held + place]);
    };
    float const bias = args.bias == nullptr ? 0.0f : ptx::to_float(args.bias[channel]);
    for (int token = lane; token < args.tokens; token += kLanes) {
        float sum = bias;
        for (int j = 0; j < args.width; ++j) sum += ptx::to_float(weight[j]) * padded(token + j);
        if (args.silu) sum /= 1.0f + expf(-sum);
        args.y[row * args.tokens + token] = ptx::from_float<T>(sum);
    }
    // Ascending, so that a state that moves within itself is read ahead of what is written.
    for (int first = 0; first < held; first += kLanes) {
        int const place = first + lane;
        float const value = place < held ? padded(args.tokens + place) : 0.0f;
        if (kLanes > 1) __syncwarp();
        if (place < held) args.present[row * held + place] = ptx::from_float<T>(value);
        if (kLanes > 1) __syncwarp();
    }
}

}  // namespace trt_nvfp4::recurrent
