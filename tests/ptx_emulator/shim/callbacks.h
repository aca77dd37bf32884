// What the emulator answers: mirrored by ctypes structures in runtime.py.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct ShimLaunch {
    const void* image;
    const char* name;
    uint32_t grid[3], block[3], cluster[3], preferred[3];  // cluster[0], preferred[0] == 0: no such attribute
    uint64_t shared_bytes;
    void** arguments;
    int32_t cooperative, programmatic;
};

struct ShimFunctionInfo {
    int32_t max_threads, shared_bytes, local_bytes, param_bytes, ptx_version;
};

struct ShimCallbacks {
    uint64_t (*allocate)(uint64_t size);
    int32_t (*release)(uint64_t address);
    int32_t (*contains)(uint64_t address, uint64_t size);
    int32_t (*launch)(const ShimLaunch* launch);
    int32_t (*function_info)(const void* image, const char* name, ShimFunctionInfo* info);
    int32_t (*allow_shared)(const void* image, const char* name, int32_t bytes);      // of dynamic shared memory
    int32_t (*allow_clusters)(const void* image, const char* name, int32_t allowed);  // of more than eight CTAs
    uint64_t (*symbol)(const void* image, const char* name);
    int32_t (*attribute)(int32_t attribute, int32_t* value);
    int32_t (*green_sms)();  // of the green context that streams are in; 0: none
    int32_t (*encode_tiled)(void* map, int32_t type, uint32_t rank, uint64_t address, const uint64_t* dims,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                            int32_t interleave, int32_t swizzle, int32_t l2_promotion, int32_t fill);
};

}  // extern "C"

namespace shim {

extern ShimCallbacks callbacks;

// Whether all bytes lie in one device allocation.
inline bool on_device(const void* pointer, size_t size) {
    return callbacks.contains(reinterpret_cast<uint64_t>(pointer), size) != 0;
}

}  // namespace shim
