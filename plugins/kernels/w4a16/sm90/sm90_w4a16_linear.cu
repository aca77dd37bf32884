#include "api/dense/sm90_w4a16.h"
#include "common/programmatic_launch.cuh"
#include "w4a16/sm90/common/launch.cuh"
#include "w4a16/sm90/common/weight_maps.h"
#include "w4a16/sm90/sm90_w4a16_linear.cuh"

namespace trt_nvfp4::sm90 {
namespace {

struct LinearWorkspace {
    float* partials;
    uint8_t* image;
    size_t size;

    LinearWorkspace(TrtNvfp4LinearArgs const& args, void* base) {
        Workspace workspace(base);
        partials = workspace.take<float>(int64_t{2} * kMostSms * kTileRows * tokens_of(args.m));
        image = args.m > kLaidOutTokens
                    ? workspace.take<uint8_t>(image_bytes(static_cast<int>(args.k), tokens_of(args.m)))
                    : nullptr;
        size = workspace.size();
    }
};

template <typename T, int kTokens>
TrtNvfp4Status run(TrtNvfp4LinearArgs const& linear, LinearWorkspace const& workspace, cudaStream_t stream) {
    int sms = 0;
    TRT_NVFP4_RETURN_IF_ERROR(read_used_sms(stream, sms));
    LinearArgs<T> args{};
    TRT_NVFP4_RETURN_IF_ERROR(encode(args.maps, linear.weight, 1, linear.n, linear.k, kBoxAlone));
    args.tensor_scale = linear.weight.tensor_scale;
    args.bias = static_cast<T const*>(linear.weight.bias);
    args.rows = static_cast<int>(linear.n);
    args.k = static_cast<int>(linear.k);
    args.m = static_cast<int>(linear.m);
    args.activation = linear.activation;
    args.x = static_cast<T const*>(linear.x);
    args.image = workspace.image;
    args.y = static_cast<T*>(linear.y);
    args.partials = reinterpret_cast<float2*>(workspace.partials);
    args.one = 1;
    int const tiles = tiles_of(args.rows);
    args.blocks = static_cast<int>(std::min<int64_t>({int64_t{tiles} * chunks_of(args.k), sms}));
    if constexpr (!kLaysOut<kTokens>) {
        int const threads = chunks_of(args.k) * (kTokens / 8) * 32;
        TRT_NVFP4_RETURN_IF_ERROR(launch_kernel(sm90_w4a16_linear_image<T, kTokens>,
                                                (threads + kLinearImageThreads - 1) / kLinearImageThreads,
                                                kLinearImageThreads, 0, true, stream, "sm90_w4a16_linear_image", args));
    }
    TRT_NVFP4_RETURN_IF_ERROR(launch_kernel(sm90_w4a16_linear<T, kTokens>, args.blocks, kTaskThreads,
                                            sizeof(LinearShared<T, kTokens>), true, stream, "sm90_w4a16_linear", args));
    return launch_kernel(sm90_w4a16_join<T, kTokens>, tiles * ((args.m + 7) / 8), 32 * kWarps, 0, true, stream,
                         "sm90_w4a16_join", args);
}

template <typename T>
TrtNvfp4Status run_as(TrtNvfp4LinearArgs const& args, LinearWorkspace const& workspace, cudaStream_t stream) {
    return with_tokens(args.m, [&](auto tokens) { return run<T, tokens()>(args, workspace, stream); });
}

}  // namespace

bool serves(TrtNvfp4LinearArgs const& args) { return args.m <= kMaxTokens && gpu_is_sm90(); }

bool takes(TrtNvfp4LinearArgs const& args) {
    return serves(args) && takes_linear(static_cast<int>(args.m), args.n, args.k, args.dtype == TRT_NVFP4_BFLOAT16);
}

size_t workspace_bytes(TrtNvfp4LinearArgs const& args) { return LinearWorkspace(args, nullptr).size; }

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    LinearWorkspace const pieces(args, workspace);
    return args.dtype == TRT_NVFP4_FLOAT16 ? run_as<__half>(args, pieces, stream)
                                           : run_as<__nv_bfloat16>(args, pieces, stream);
}

}  // namespace trt_nvfp4::sm90
