// The current GPU's memory.
#pragma once

#include <algorithm>
#include <atomic>

#include "api/launch.h"

namespace trt_nvfp4 {

// Bytes a second, by the memory's clock and the width of its bus; 0 where the driver does not say. Found once for a
// GPU, not at every launch: the driver may ask the GPU for its clock.
inline TrtNvfp4Status read_memory_bandwidth(float& bandwidth) {
    constexpr int kMostDevices = 64;
    constexpr float kUnknown = -1.0f;  // asked in vain
    static std::atomic<float> known[kMostDevices];
    int device = 0, kilohertz = 0, bits = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    bool const kept = device < kMostDevices;
    if (float const found = kept ? known[device].load() : 0.0f; found != 0.0f) {
        bandwidth = std::max(found, 0.0f);
        return TRT_NVFP4_SUCCESS;
    }
    auto const read = [&](int& value, cudaDeviceAttr attribute) {
        return check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    };
    TRT_NVFP4_RETURN_IF_ERROR(read(kilohertz, cudaDevAttrMemoryClockRate));
    TRT_NVFP4_RETURN_IF_ERROR(read(bits, cudaDevAttrGlobalMemoryBusWidth));
    bandwidth = 2e3f * static_cast<float>(kilohertz) * static_cast<float>(bits) / 8.0f;  // two bits a clock
    if (kept) known[device] = bandwidth > 0.0f ? bandwidth : kUnknown;
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4
