// Tensor maps, which tell the copy engine what lies where (sm_90 on).
#pragma once

#include <string>

#include "api/launch.h"
#include "device/driver_function.h"

namespace trt_nvfp4 {

// Encodes a map of `rank` dimensions, the innermost first; `strides`, in bytes, leave that one out. `instead`: the
// alternative that the error of a driver without tensor maps names.
inline TrtNvfp4Status encode_tensor_map(CUtensorMap& map, CUtensorMapDataType type, int rank, void const* data,
                                        cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        char const* instead) {
    static auto* const encode_tiled =
        driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
    if (encode_tiled == nullptr) {
        return record_error(TRT_NVFP4_UNSUPPORTED,
                            std::string("the CUDA driver has no cuTensorMapEncodeTiled; use ") + instead);
    }
    cuuint32_t const ones[] = {1, 1, 1};
    CUresult const result =
        encode_tiled(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes, strides, box, ones,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_CUDA_ERROR,
                        "cuTensorMapEncodeTiled: CUDA driver error " + std::to_string(static_cast<int>(result)));
}

}  // namespace trt_nvfp4
