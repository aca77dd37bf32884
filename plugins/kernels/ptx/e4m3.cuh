// E4M3FN: largest 448, NaN at 0x7f, no infinity.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace trt_nvfp4::ptx {

// As e2m1_decode: the exponent biases differ by 120. Block scales are never negative, so the sign bit is not read.
__device__ __forceinline__ float e4m3_decode_unsigned(uint32_t code) {
    uint32_t const magnitude = code & 0x7fu;
    return magnitude == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float(magnitude << 20) * 0x1p120f;
}

__device__ __forceinline__ float e4m3_decode(uint32_t code) {
    float const magnitude = e4m3_decode_unsigned(code);
    return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

// Two values, of a word's lower (kHalf 0) or upper half, as float16, exactly.
template <int kHalf>
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t codes) {
    uint32_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    auto const half = static_cast<uint16_t>(codes >> 16 * kHalf);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(half));
#endif
    return pair;
}

// Round to nearest even, saturating at 448, subnormals kept; NaN stays NaN.
__device__ __forceinline__ uint8_t e4m3_encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

}  // namespace trt_nvfp4::ptx
