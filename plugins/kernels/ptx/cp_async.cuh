// Addresses in shared memory, and asynchronous copies to them from global memory (sm_80 on), 16 bytes each, past L1.
#pragma once

#include <cstdint>

namespace trt_nvfp4::ptx {

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// If it is wanted, without a branch; else nothing is known of the result.
__device__ __forceinline__ void load_shared_if(bool wanted, uint32_t address, uint2& words) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n@wanted ld.shared.v2.u32 {%0, %1}, [%2];\n}"
                 : "=r"(words.x), "=r"(words.y)
                 : "r"(address), "r"(static_cast<uint32_t>(wanted)));
}
__device__ __forceinline__ void load_shared_if(bool wanted, uint32_t address, uint32_t (&words)[4]) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "r"(address), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
__device__ __forceinline__ uint4 load_shared_unit(uint32_t address) {
    uint4 unit;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "r"(address));
    return unit;
}
__device__ __forceinline__ float load_shared(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void cp_async_16(uint32_t destination, void const* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// Writes zeros, and reads nothing, where `inside` is false.
__device__ __forceinline__ void cp_async_16(uint32_t destination, void const* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns once at most kPending of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace trt_nvfp4::ptx
