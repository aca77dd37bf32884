#include <mutex>
#include <string>

#include "api/launch.h"

namespace trt_nvfp4 {
namespace {

// TensorRT may build on threads of its own, and the builder asks from another.
std::mutex error_mutex;
std::string first_error;

}  // namespace

TrtNvfp4Status record_error(TrtNvfp4Status status, std::string const& message) {
    std::lock_guard<std::mutex> const lock(error_mutex);
    if (first_error.empty()) first_error = message;
    return status;
}

}  // namespace trt_nvfp4

__attribute__((visibility("default"))) char const* trtNvfp4LastError(void) {
    thread_local std::string taken;
    std::lock_guard<std::mutex> const lock(trt_nvfp4::error_mutex);
    taken.clear();
    taken.swap(trt_nvfp4::first_error);
    return taken.c_str();
}
