// The activations that are x * sigmoid(x * (linear + cubic * x^2)), in a few instructions without branches: for
// epilogues that have too few warps to hide the exact functions' latency. Relative error under 1e-5.
#pragma once

#include "api/trt_nvfp4.h"

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

}  // namespace trt_nvfp4
