// Kernel launches: programmatic dependent ones (sm_90 on), of kernels that start while the one before them ends and
// wait for its writes; and cooperative ones, of blocks that wait for each other.
#pragma once

#include <utility>

#include "api/launch.h"

namespace trt_nvfp4 {

// Returns once all kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start, once every block has said so or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the loaded code of a kernel holds the wait above, so that it may start early. The PTX that it was made of
// decides and not the GPU, which may be newer.
inline bool can_start_early(cudaFuncAttributes const& attributes) { return attributes.ptxVersion >= 90; }

inline cudaLaunchAttribute programmatic_attribute() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}

inline cudaLaunchAttribute cooperative_attribute() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    return attribute;
}

// Lets blocks of a kernel have `bytes` of dynamic shared memory. It is the kernel's limit, not a launch's: threads with
// contexts of their own may launch the same kernel at the same time, so every call has to name the same for it.
template <typename... Parameters>
TrtNvfp4Status allow_shared_memory(void (*kernel)(Parameters...), size_t bytes, char const* name) {
    return check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
}

// Launches a kernel that waits for those before it; where `programmatic` is false, or its code cannot wait, the stream
// waits instead. `shared`: bytes of dynamic shared memory, which blocks may have; `cluster`: neighbouring blocks that
// run together. Not <<<>>>, behind which only cudaGetLastError tells of a failure: that may be one of the caller's,
// before.
template <typename... Parameters, typename... Arguments>
TrtNvfp4Status launch_allowed(void (*kernel)(Parameters...), dim3 blocks, unsigned cluster, int threads, size_t shared,
                              bool programmatic, cudaStream_t stream, char const* name, Arguments&&... arguments) {
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (programmatic) {
        cudaFuncAttributes code{};
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaFuncGetAttributes(&code, kernel), name));
        if (can_start_early(code)) attributes[count++] = programmatic_attribute();
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {cluster, 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

// The same of a kernel that has so many bytes at every launch, or never more than the 48 KB that need no asking.
template <typename... Parameters, typename... Arguments>
TrtNvfp4Status launch_kernel(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared, bool programmatic,
                             cudaStream_t stream, char const* name, Arguments&&... arguments) {
    constexpr size_t kWithoutAsking = 48 * 1024;
    if (shared > kWithoutAsking) TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, shared, name));
    return launch_allowed(kernel, blocks, 1, threads, shared, programmatic, stream, name,
                          std::forward<Arguments>(arguments)...);
}

}  // namespace trt_nvfp4
