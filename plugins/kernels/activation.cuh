// Activation functions in float32, without fast-math.
#pragma once

#include "api/trt_nvfp4.h"

namespace trt_nvfp4 {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float activate(TrtNvfp4Activation activation, float x) {
    switch (activation) {
        case TRT_NVFP4_RELU:
            return fmaxf(x, 0.0f);
        case TRT_NVFP4_RELU2: {
            float const positive = fmaxf(x, 0.0f);
            return positive * positive;
        }
        case TRT_NVFP4_SILU:
            return x * sigmoid(x);
        case TRT_NVFP4_GELU:
            return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case TRT_NVFP4_GELU_TANH:
            return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case TRT_NVFP4_GELU_QUICK:
            return x * sigmoid(1.702f * x);
        default:
            return x;
    }
}

// SWIGLU_CLAMPED is gpt-oss's: the gate is clamped above, up on both sides and shifted by one.
__device__ __forceinline__ float gated_activate(TrtNvfp4Activation activation, float gate, float up, float alpha,
                                                float limit) {
    if (activation != TRT_NVFP4_SWIGLU_CLAMPED) return activate(activation, gate) * up;
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    return (up + 1.0f) * gate * sigmoid(alpha * gate);
}

}  // namespace trt_nvfp4
