#include "api/moe/moe_plan.h"
#include "moe/moe_plan_launch.cuh"

namespace trt_nvfp4 {
namespace {

TrtNvfp4Status launch(RouteArgs const& args, TrtNvfp4DataType dtype, cudaStream_t stream) {
    constexpr int64_t kBytes = 16 * 4;  // that a thread erases
    int64_t const erasers = (args.sentinel_bytes + kBytes - 1) / kBytes;
    int64_t const gates = args.shared_gate == nullptr ? 0 : int64_t{args.tokens} * 32;
    return launch_plan_beside(args, GateAndErase{dtype}, std::max(erasers, gates), stream);
}

}  // namespace

template <>
TrtNvfp4Status launch_plan<float>(RouteArgs const& args, cudaStream_t stream) {
    return launch(args, TRT_NVFP4_FLOAT32, stream);
}

template <>
TrtNvfp4Status launch_plan<__half>(RouteArgs const& args, cudaStream_t stream) {
    return launch(args, TRT_NVFP4_FLOAT16, stream);
}

template <>
TrtNvfp4Status launch_plan<__nv_bfloat16>(RouteArgs const& args, cudaStream_t stream) {
    return launch(args, TRT_NVFP4_BFLOAT16, stream);
}

}  // namespace trt_nvfp4
