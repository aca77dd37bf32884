// Functions that the GPU approximates in one instruction, to about 2^-22; results that are too small to be normal are
// zero.
#pragma once

namespace trt_nvfp4::ptx {

__device__ __forceinline__ float exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

}  // namespace trt_nvfp4::ptx
