// E2M1 (OCP MX 1.0): values 0, .5, 1, 1.5, 2, 3, 4, 6 and negatives. Blackwell converts to it.
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

// Exponent and mantissa land on float32's, where the bias differs by 126; a subnormal code becomes a subnormal float.
__device__ __forceinline__ float e2m1_decode(uint32_t code) {
    return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}

// Round to nearest, ties to even code, saturating; NaN becomes 0. The sign of zero is kept.
__device__ __forceinline__ uint32_t e2m1_encode(float x) {
    float const a = fabsf(x);
    uint32_t const magnitude =
        (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (__float_as_uint(x) >> 28 & 8u) | magnitude;
}

// The same of two values, `low` in the low nibble.
__device__ __forceinline__ uint32_t e2m1_encode(float low, float high) {
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
    // The instruction makes 6 of NaN.
    low = low == low ? low : 0.0f;
    high = high == high ? high : 0.0f;
    uint32_t codes;
    asm("{\n.reg .b8 codes;\ncvt.rn.satfinite.e2m1x2.f32 codes, %2, %1;\ncvt.u32.u8 %0, codes;\n}"
        : "=r"(codes)
        : "f"(low), "f"(high));
    return codes;
#else
    return e2m1_encode(low) | e2m1_encode(high) << 4;
#endif
}

}  // namespace trt_nvfp4::ptx
