// Activations of one value or several in little code: launches of a few microseconds fetch all their instructions anew,
// so that an epilogue's length counts.
//
// The ones that are x * sigmoid(x * (linear + cubic * x^2)), in a few instructions without branches: of
// relative error under 1e-5; the others are computed one after another.
#pragma once

#include "common/activation.cuh"
#include "ptx/approximate.cuh"

namespace trt_nvfp4 {

// For clamped activations: the function of the clamped gate; SWIGLU_CLAMPED's linear factor is `alpha`.
struct SmoothActivation {
    float linear, cubic;  // times -log2(e)
    bool fits;            // whether it is the activation

    __device__ __forceinline__ explicit SmoothActivation(TrtNvfp4Activation activation, float alpha = 1.0f) {
        bool const tanh = activation == TRT_NVFP4_GELU_TANH;
        bool const quick = activation == TRT_NVFP4_GELU_QUICK;
        bool const swiglu = activation == TRT_NVFP4_SWIGLU_CLAMPED;
        constexpr float kLog2E = 1.44269504088896341f;
        fits = tanh || quick || activation == TRT_NVFP4_SILU || is_clamped(activation);
        // (1 + tanh(y)) / 2 = sigmoid(2 y)
        linear = -kLog2E * (tanh ? 2.0f * 0.79788456080286536f : quick ? 1.702f : swiglu ? alpha : 1.0f);
        cubic = tanh ? linear * 0.044715f : 0.0f;
    }
    __device__ __forceinline__ float operator()(float x) const {
        return x * ptx::reciprocal(1.0f + ptx::exp2(x * fmaf(cubic * x, x, linear)));
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
    if (is_clamped(activation)) clamp_gate(limit, shift_of(activation), gate, up);
    SmoothActivation const smooth(activation, alpha);
    return (smooth.fits ? smooth(gate) : activate_rare(activation, gate)) * up;
}

template <int kValues>
__device__ __forceinline__ void activate_values(TrtNvfp4Activation activation, float (&values)[kValues]) {
    if (activation == TRT_NVFP4_IDENTITY) return;
    SmoothActivation const smooth(activation);
    if (smooth.fits) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] = smooth(values[i]);
        return;
    }
    // The values take turns in the first place, so that no index is unknown at compile time.
#pragma unroll 1
    for (int turn = 0; turn < kValues; ++turn) {
        float const result = activate_rare(activation, values[0]);
#pragma unroll
        for (int i = 0; i + 1 < kValues; ++i) values[i] = values[i + 1];
        values[kValues - 1] = result;
    }
}

// Values 2 i and 2 i + 1, gate and up, make value i.
template <int kValues>
__device__ __forceinline__ void gate_values(TrtNvfp4Activation activation, float alpha, float limit,
                                            float (&values)[kValues]) {
    constexpr int kPairs = kValues / 2;
    if (is_clamped(activation)) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) clamp_gate(limit, shift_of(activation), values[2 * i], values[2 * i + 1]);
    }
    SmoothActivation const smooth(activation, alpha);
    if (smooth.fits) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) values[i] = smooth(values[2 * i]) * values[2 * i + 1];
        return;
    }
    float results[kPairs] = {};
#pragma unroll 1
    for (int turn = 0; turn < kPairs; ++turn) {
        float const result = activate_rare(activation, values[0]) * values[1];
#pragma unroll
        for (int i = 0; i + 2 < kValues; ++i) values[i] = values[i + 2];
#pragma unroll
        for (int i = 0; i + 1 < kPairs; ++i) results[i] = results[i + 1];
        results[kPairs - 1] = result;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) values[i] = results[i];
}

}  // namespace trt_nvfp4
