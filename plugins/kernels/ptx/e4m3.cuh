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

// Round to nearest even, saturating at 448, subnormals kept; NaN stays NaN.
__device__ __forceinline__ uint8_t e4m3_encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

}  // namespace trt_nvfp4::ptx
