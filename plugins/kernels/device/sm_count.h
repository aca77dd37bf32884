// SMs that kernels run on.
#pragma once

#include <algorithm>

#include "api/launch.h"
#include "device/driver_function.h"

namespace trt_nvfp4 {

// SMs of the current GPU.
inline TrtNvfp4Status read_sms(int& sms) {
    int device = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    return check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
}

// SMs for kernels in a stream: those of its green context, where it has one. Blocks that wait for each other find no
// room on others.
inline TrtNvfp4Status read_sms(cudaStream_t stream, int& sms) {
    static auto* const context_of = driver_function<decltype(cuStreamGetGreenCtx)>("cuStreamGetGreenCtx", 12040);
    static auto* const resource_of =
        driver_function<decltype(cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(sms));
    CUgreenCtx context = nullptr;
    CUdevResource resource{};
    if (context_of != nullptr && resource_of != nullptr && context_of(stream, &context) == CUDA_SUCCESS &&
        context != nullptr && resource_of(context, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
        sms = std::min(sms, static_cast<int>(resource.sm.smCount));
    }
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4
