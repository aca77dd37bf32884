// The smaller and the larger of two, and NaN where one of them is: fminf and fmaxf would give the other.
#pragma once

namespace trt_nvfp4::ptx {

__device__ __forceinline__ float minimum(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float maximum(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

}  // namespace trt_nvfp4::ptx
