#include "api/validate.h"
#include "recurrent/causal_conv.cuh"

namespace trt_nvfp4 {
namespace {

constexpr int64_t kMostTokensOfThread = 16;

template <typename T, int kLanes>
TrtNvfp4Status launch(TrtNvfp4CausalConvArgs const& args, cudaStream_t stream) {
    recurrent::ConvArgs<T> const call{args.batch * args.channels,
                                      static_cast<int>(args.channels),
                                      static_cast<int>(args.tokens),
                                      static_cast<int>(args.width),
                                      args.silu != 0,
                                      static_cast<T const*>(args.x),
                                      static_cast<T const*>(args.weight),
                                      static_cast<T const*>(args.bias),
                                      static_cast<T const*>(args.past_state),
                                      static_cast<T*>(args.y),
                                      static_cast<T*>(args.present_state)};
    constexpr int kRows = recurrent::kConvThreads / kLanes;
    auto const blocks = static_cast<unsigned>((call.rows + kRows - 1) / kRows);
    return launch_kernel(recurrent::causal_conv<T, kLanes>, blocks, recurrent::kConvThreads, 0, true, stream,
                         "causal_conv", call);
}

TrtNvfp4Status validate(TrtNvfp4CausalConvArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "CausalConvWithState: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("CausalConvWithState", args->batch));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("CausalConvWithState", args->tokens));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CausalConvWithState: channels", args->channels));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CausalConvWithState: k", args->width));
    return require(args->tokens < (int64_t{1} << 30) && args->width < (int64_t{1} << 30) &&
                       args->channels < (int64_t{1} << 31) && args->batch * args->channels < (int64_t{1} << 33),
                   "CausalConvWithState: at most 2^30 tokens and 2^33 rows");
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4CausalConvWorkspace(TrtNvfp4CausalConvArgs const* args, size_t* bytes) {
    *bytes = 0;
    return trt_nvfp4::validate(args);
}

TrtNvfp4Status trtNvfp4CausalConvTactics(TrtNvfp4CausalConvArgs const* args, TrtNvfp4Tactics* tactics) {
    *tactics = {1, 1, {TRT_NVFP4_TACTIC_GENERIC}};
    return trt_nvfp4::validate(args);
}

TrtNvfp4Status trtNvfp4CausalConv(TrtNvfp4CausalConvArgs const* args, void*, size_t, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    if (args->batch == 0) return TRT_NVFP4_SUCCESS;
    return dispatch_dtype(args->dtype, [&](auto element) {
        using T = decltype(element);
        return args->tokens <= kMostTokensOfThread ? launch<T, 1>(*args, stream) : launch<T, 32>(*args, stream);
    });
}
