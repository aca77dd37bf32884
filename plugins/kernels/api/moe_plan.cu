#include "../moe_routing.cuh"
#include "moe_plan.h"

namespace trt_nvfp4 {
namespace {

TrtNvfp4Status read_dependent_launch(bool& possible) {
    int ordinal = 0, major = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice"));
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
                                         "cudaDeviceGetAttribute"));
    possible = major >= 9;
    return TRT_NVFP4_SUCCESS;
}

// One block sorts the pairs; kSlots > 0: and routes all tokens.
template <int kSlots>
TrtNvfp4Status launch_sort(RouteArgs const& args, TrtNvfp4DataType dtype, bool programmatic, cudaStream_t stream) {
    // A thread for each expert, and a warp for each token, or threads for many pairs or to erase.
    constexpr int kFewestThreads = 128;
    int const workers = kSlots > 0 ? std::max(kFewestThreads, 32 * args.tokens) : kPlanThreads;
    int const threads = std::min(kPlanThreads, std::max((args.experts + 31) / 32 * 32, workers));
    constexpr int64_t kMostHelpers = 128;
    int64_t const bytes_per_block = int64_t{threads} * 16 * 4;
    int64_t const erasers = (args.absents + bytes_per_block - 1) / bytes_per_block;
    int64_t const gates = args.shared_gate == nullptr ? 0 : (args.tokens + threads / 32 - 1) / (threads / 32);
    int64_t const helpers = std::min(std::max(erasers, gates), kMostHelpers);
    return launch_kernel(moe_plan<kSlots>, 1 + helpers, threads, 0, programmatic, stream, "moe_plan", args, dtype);
}

template <int kSlots>
TrtNvfp4Status launch_slots(RouteArgs const& args, TrtNvfp4DataType dtype, bool programmatic, cudaStream_t stream) {
    if constexpr (kSlots <= kPlanSlots) {
        if (args.tokens <= kPlanTokens) return launch_sort<kSlots>(args, dtype, programmatic, stream);
    }
    int const blocks = (args.tokens + kRouteThreads / 32 - 1) / (kRouteThreads / 32);
    TRT_NVFP4_RETURN_IF_ERROR(
        launch_kernel(moe_route<kSlots>, blocks, kRouteThreads, 0, programmatic, stream, "moe_route", args));
    return launch_sort<0>(args, dtype, programmatic, stream);
}

TrtNvfp4Status launch_experts(RouteArgs const& args, TrtNvfp4DataType dtype, cudaStream_t stream) {
    bool programmatic = false;
    TRT_NVFP4_RETURN_IF_ERROR(read_dependent_launch(programmatic));
    if (args.experts <= 4 * 32) return launch_slots<4>(args, dtype, programmatic, stream);
    if (args.experts <= 8 * 32) return launch_slots<8>(args, dtype, programmatic, stream);
    if (args.experts <= 16 * 32) return launch_slots<16>(args, dtype, programmatic, stream);
    return launch_slots<32>(args, dtype, programmatic, stream);
}

}  // namespace

template <>
TrtNvfp4Status launch_plan<float>(RouteArgs const& args, cudaStream_t stream) {
    return launch_experts(args, TRT_NVFP4_FLOAT32, stream);
}

template <>
TrtNvfp4Status launch_plan<__half>(RouteArgs const& args, cudaStream_t stream) {
    return launch_experts(args, TRT_NVFP4_FLOAT16, stream);
}

template <>
TrtNvfp4Status launch_plan<__nv_bfloat16>(RouteArgs const& args, cudaStream_t stream) {
    return launch_experts(args, TRT_NVFP4_BFLOAT16, stream);
}

}  // namespace trt_nvfp4
