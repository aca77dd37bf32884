// Matrices in E4M3 on the device: rows with one scale, weights with one per channel.
#pragma once

#include "api/launch.h"

namespace trt_nvfp4 {

// x = e4m3 * scale: the given scale, or amax / 448 where that is 0; never subnormal.
struct Fp8Scale {
    float const* given;
    uint32_t const* amax_bits;

#ifdef __CUDACC__
    __device__ __forceinline__ float resolve() const {
        float const scale = *given;
        if (scale != 0.0f) return scale;
        // amax / 448 rounded to nearest, without the function call of a division, before which wgmma would drain.
        float const amax = __uint_as_float(*amax_bits);
        float const estimate = amax * (1.0f / 448.0f);
        float const quotient = fmaf(fmaf(estimate, -448.0f, amax), 1.0f / 448.0f, estimate);
        return quotient < 0x1p-126f ? 0x1p-126f : quotient;
    }
#endif
};

struct Fp8Rows {
    uint8_t const* values;  // [rows, k]
    Fp8Scale scale;
};

struct Fp8Channels {
    uint8_t const* values;  // [rows, k]
    float const* scales;    // [rows]
};

}  // namespace trt_nvfp4
