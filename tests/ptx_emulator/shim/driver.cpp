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
    bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    if (status) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return known ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDA_VERSION, flags, status);
}

}  // extern "C"
