// What our kernels share around CUTLASS's main loops: the epilogue's interface and the launch.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cute/tensor.hpp>

#include "common/programmatic_launch.cuh"

namespace trt_nvfp4 {

// The part of CUTLASS's epilogue interface that asks for nothing: no source, no shared memory, no workspace.
template <class Gemm>
struct EpilogueBase {
    using Arguments = Gemm;
    using Params = Gemm;
    using ElementC = void;
    using ElementD = void;
    using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
    using StrideD = StrideC;
    struct SharedStorage {};

    template <class Problem>
    static Params to_underlying_arguments(Problem const&, Arguments const& arguments, void*) {
        return arguments;
    }
    template <class Problem>
    static size_t get_workspace_size(Problem const&, Arguments const&) {
        return 0;
    }
    template <class Problem>
    static bool can_implement(Problem const&, Arguments const&) {
        return true;
    }
};

// `programmatic`: the kernel waits for those before it itself.
template <class Kernel>
TrtNvfp4Status launch_cutlass(typename Kernel::Params const& params, bool programmatic, cudaStream_t stream,
                              char const* name) {
    auto* const kernel = cutlass::device_kernel<Kernel>;
    constexpr size_t shared_bytes = Kernel::SharedStorageSize;
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, shared_bytes, name));
    constexpr auto cluster = typename Kernel::ClusterShape{};
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (programmatic) attributes[count++] = programmatic_attribute();
    if (cute::size(cluster) > 1) {  // a cluster of one may still cap occupancy
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {cute::size<0>(cluster), cute::size<1>(cluster), 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = Kernel::get_grid_shape(params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace trt_nvfp4
