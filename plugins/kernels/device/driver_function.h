// Functions of the CUDA driver that the library does not link against.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace trt_nvfp4 {

// The driver's function as `version` of CUDA has it (12040 is 12.4); null where the driver is older.
template <typename F>
F* driver_function(char const* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
    return reinterpret_cast<F*>(function);
}

}  // namespace trt_nvfp4
