// Activation functions in float32, without fast-math. NaN makes NaN.
#pragma once

#include "api/trt_nvfp4.h"
#include "ptx/extremum.cuh"

namespace trt_nvfp4 {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float activate(TrtNvfp4Activation activation, float x) {
    switch (activation) {
        case TRT_NVFP4_RELU:
            return ptx::maximum(x, 0.0f);
        case TRT_NVFP4_RELU2: {
            float const positive = ptx::maximum(x, 0.0f);
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

// Whether the gate is clamped above, and up on both sides.
__device__ __forceinline__ bool is_clamped(TrtNvfp4Activation activation) {
    return activation == TRT_NVFP4_SWIGLU_CLAMPED || activation == TRT_NVFP4_SILU_CLAMPED;
}

// What is then added to up.
__device__ __forceinline__ float shift_of(TrtNvfp4Activation activation) {
    return activation == TRT_NVFP4_SWIGLU_CLAMPED ? 1.0f : 0.0f;
}

// A gate and its up, of an activation that clamps them, become values that it times the second is taken of.
__device__ __forceinline__ void clamp_gate(float limit, float shift, float& gate, float& up) {
    gate = ptx::minimum(gate, limit);
    up = ptx::minimum(ptx::maximum(up, -limit), limit) + shift;
}

// SWIGLU_CLAMPED is gpt-oss's, SILU_CLAMPED DeepSeek-V4's.
__device__ __forceinline__ float gated_activate(TrtNvfp4Activation activation, float gate, float up, float alpha,
                                                float limit) {
    if (!is_clamped(activation)) return activate(activation, gate) * up;
    clamp_gate(limit, shift_of(activation), gate, up);
    return up * gate * sigmoid(activation == TRT_NVFP4_SWIGLU_CLAMPED ? alpha * gate : gate);
}

}  // namespace trt_nvfp4
