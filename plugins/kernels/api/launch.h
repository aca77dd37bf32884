// What every launcher needs: recorded errors, checked launches, and a workspace carved into aligned pieces.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "api/trt_nvfp4.h"

// In front of functions that a library may be linked without (plugins/compile/kernel_groups.py): their address is then
// null, which require_linked() reports.
#define TRT_NVFP4_OPTIONAL __attribute__((weak))

namespace trt_nvfp4 {

// Records the process's first unread error (see trtNvfp4LastError) and hands `status` back.
TrtNvfp4Status record_error(TrtNvfp4Status status, std::string const& message);

// To be called straight after a launch or a runtime call's result; names what failed.
inline TrtNvfp4Status check_cuda(cudaError_t error, char const* what) {
    if (error == cudaSuccess) return TRT_NVFP4_SUCCESS;
    cudaGetLastError();  // so that who checks the next launch does not find it again
    char const* const remedy =
        error == cudaErrorNoKernelImageForDevice
            ? "; the plugin library was compiled for another GPU: build the engine with the --target of this one"
            : "";
    return record_error(TRT_NVFP4_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                                                  cudaGetErrorString(error) + ")" + remedy);
}

// Returns from the enclosing function with the first status that is not success.
#define TRT_NVFP4_RETURN_IF_ERROR(expression)                                                          \
    do {                                                                                               \
        if (TrtNvfp4Status const status_ = (expression); status_ != TRT_NVFP4_SUCCESS) return status_; \
    } while (0)

// Hands out 256-byte aligned pieces. Over a null base it only counts, so that one function both sizes and lays out.
class Workspace {
 public:
    explicit Workspace(void* base = nullptr) : base_(static_cast<uint8_t*>(base)) {}

    template <typename T>
    T* take(int64_t count) {
        uint8_t* const piece = base_ == nullptr ? nullptr : base_ + size_;
        size_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
        return reinterpret_cast<T*>(piece);
    }

    size_t size() const { return size_; }

 private:
    uint8_t* base_;
    size_t size_ = 0;
};

// Calls f with a value of the C++ type that `dtype` names.
template <typename F>
TrtNvfp4Status dispatch_dtype(TrtNvfp4DataType dtype, F&& f) {
    switch (dtype) {
        case TRT_NVFP4_FLOAT32:
            return f(float{});
        case TRT_NVFP4_FLOAT16:
            return f(__half{});
        case TRT_NVFP4_BFLOAT16:
            return f(__nv_bfloat16{});
    }
    return record_error(TRT_NVFP4_INVALID_ARGUMENT, "unknown data type " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace trt_nvfp4
