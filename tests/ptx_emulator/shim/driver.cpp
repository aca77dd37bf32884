// The driver API that host code reaches, directly or through the runtime's entry points.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "callbacks.h"

namespace {

template <class T>
CUresult fill(CUdeviceptr target, T value, size_t count) {
    auto* values = reinterpret_cast<T*>(target);
    if (!shim::on_device(values, count * sizeof(T))) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; ++i) values[i] = value;
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                                CUtensorMapFloatOOBfill fill) {
    return static_cast<CUresult>(shim::callbacks.encode_tiled(map, type, rank, reinterpret_cast<uint64_t>(address),
                                                              dims, strides, box, element_strides, interleave, swizzle,
                                                              l2_promotion, fill));
}

CUresult cuStreamGetGreenCtx(CUstream, CUgreenCtx* context) {
    static char all_streams_context;
    *context = shim::callbacks.green_sms() > 0 ? reinterpret_cast<CUgreenCtx>(&all_streams_context) : nullptr;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx, CUdevResource* resource, CUdevResourceType type) {
    if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_VALUE;
    resource->type = type;
    resource->sm.smCount = static_cast<unsigned>(shim::callbacks.green_sms());
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream) {
    return fill(target, value, count);
}

CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream) {
    return fill(target, value, count);
}

CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream) {
    return fill(target, value, count);
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_SUCCESS ? "no error" : "error of the emulator's CUDA driver";
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    struct {
        const char* name;
        void* function;
    } const known[] = {{"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
                       {"cuStreamGetGreenCtx", reinterpret_cast<void*>(&cuStreamGetGreenCtx)},
                       {"cuGreenCtxGetDevResource", reinterpret_cast<void*>(&cuGreenCtxGetDevResource)}};
    *function = nullptr;
    for (auto const& entry : known) {
        if (std::strcmp(symbol, entry.name) == 0) *function = entry.function;
    }
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDA_VERSION, flags, status);
}

}  // extern "C"
