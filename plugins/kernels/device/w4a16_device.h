// What the launch choices of the W4A16 decode kernels ask of the current GPU, or of a stream's part of it.
#pragma once

#include "api/launch.h"
#include "device/memory_bandwidth.h"
#include "device/sm_count.h"
#include "heuristics/w4a16.h"

namespace trt_nvfp4::w4a16 {

inline TrtNvfp4Status read_device(cudaStream_t stream, Device& device) {
    int ordinal = 0, cooperative = 0, all_sms = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice"));
    auto const read = [&](int& value, cudaDeviceAttr attribute) {
        return check_cuda(cudaDeviceGetAttribute(&value, attribute, ordinal), "cudaDeviceGetAttribute");
    };
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(all_sms));
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, device.sm_count));
    TRT_NVFP4_RETURN_IF_ERROR(read(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
    TRT_NVFP4_RETURN_IF_ERROR(read(cooperative, cudaDevAttrCooperativeLaunch));
    TRT_NVFP4_RETURN_IF_ERROR(read(device.major, cudaDevAttrComputeCapabilityMajor));
    TRT_NVFP4_RETURN_IF_ERROR(read_memory_bandwidth(device.bandwidth));
    device.bandwidth *= static_cast<float>(device.sm_count) / static_cast<float>(all_sms);
    device.cooperative = cooperative != 0;
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4::w4a16
