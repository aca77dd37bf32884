// Activations of one or eight values in little code: launches of a few microseconds fetch all their instructions anew,
// so that an epilogue's length counts.
//
// The ones that are x * sigmoid(x * (linear + cubic * x^2)), in a few instructions without branches: of
// relative error under 1e-5; the others are computed one after another.
#pragma once

#include "activation.cuh"

namespace trt_nvfp4 {

struct SmoothActivation {
    float linear, cubic;
    bool fits;  // whether it is the activation

    __device__ __forceinline__ explicit SmoothActivation(TrtNvfp4Activation activation) {
        bool const tanh = activation == TRT_NVFP4_GELU_TANH;
        bool const quick = activation == TRT_NVFP4_GELU_QUICK;
        fits = tanh || quick || activation == TRT_NVFP4_SILU;
        // (1 + tanh(y)) / 2 = sigmoid(2 y)
        linear = tanh ? 2.0f * 0.79788456080286536f : quick ? 1.702f : 1.0f;
        cubic = tanh ? 2.0f * 0.79788456080286536f * 0.044715f : 0.0f;
    }
    __device__ __forceinline__ float operator()(float x) const {
        return __fdividef(x, 1.0f + __expf(-x * fmaf(cubic * x, x, linear)));
    }
};

// As activate() of those that no SmoothActivation fits, in a quarter of the code of all.
__device__ __forceinline__ float activate_rare(TrtNvfp4Activation activation, float x) {
    if (activation == TRT_NVFP4_GELU) return activate(TRT_NVFP4_GELU, x);
    if (activation == TRT_NVFP4_RELU2) return activate(TRT_NVFP4_RELU2, x);
    return activation == TRT_NVFP4_RELU ? activate(TRT_NVFP4_RELU, x) : x;
}

__device__ __forceinline__ float activate_one(TrtNvfp4Activation activation, float x) {
    SmoothActivation const smooth(activation);
    return smooth.fits ? smooth(x) : activate_rare(activation, x);
}

__device__ __forceinline__ float gate_one(TrtNvfp4Activation activation, float alpha, float limit, float gate,
                                          float up) {
    if (activation != TRT_NVFP4_SWIGLU_CLAMPED) return activate_one(activation, gate) * up;
    SmoothActivation smooth(activation);
    smooth.linear = alpha;
    return smooth(fminf(gate, limit)) * (fminf(fmaxf(up, -limit), limit) + 1.0f);
}

__device__ __forceinline__ void activate_eight(TrtNvfp4Activation activation, float (&values)[8]) {
    if (activation == TRT_NVFP4_IDENTITY) return;
    SmoothActivation const smooth(activation);
    if (smooth.fits) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = smooth(values[i]);
        return;
    }
    // The values take turns in the first place, so that no index is unknown at compile time.
#pragma unroll 1
    for (int turn = 0; turn < 8; ++turn) {
        float const result = activate_rare(activation, values[0]);
#pragma unroll
        for (int i = 0; i < 7; ++i) values[i] = values[i + 1];
        values[7] = result;
    }
}

// Values 2 i and 2 i + 1, gate and up, make value i.
__device__ __forceinline__ void gate_eight(TrtNvfp4Activation activation, float alpha, float limit,
                                           float (&values)[8]) {
    SmoothActivation smooth(activation);
    if (activation == TRT_NVFP4_SWIGLU_CLAMPED) {
        smooth.linear = alpha;
        smooth.fits = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[2 * i] = fminf(values[2 * i], limit);
            values[2 * i + 1] = fminf(fmaxf(values[2 * i + 1], -limit), limit) + 1.0f;
        }
    }
    if (smooth.fits) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = smooth(values[2 * i]) * values[2 * i + 1];
        return;
    }
    float results[4] = {};
#pragma unroll 1
    for (int turn = 0; turn < 4; ++turn) {
        float const result = activate_rare(activation, values[0]) * values[1];
#pragma unroll
        for (int i = 0; i < 6; ++i) values[i] = values[i + 2];
#pragma unroll
        for (int i = 0; i < 3; ++i) results[i] = results[i + 1];
        results[3] = result;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = results[i];
}

}  // namespace trt_nvfp4
