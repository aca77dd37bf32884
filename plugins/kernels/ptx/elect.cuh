// One lane of a warp, for what a warp does once (sm_90 on).
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

// True for one lane of a warp whose lanes all ask. The compiler then knows that it is one, and surrounds the copies
// that this lane asks for by no loop over lanes, as it does behind a comparison with the lane's number.
__device__ __forceinline__ bool elect() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, one;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace trt_nvfp4::ptx
