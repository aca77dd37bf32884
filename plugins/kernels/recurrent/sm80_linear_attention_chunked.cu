#include <algorithm>

#include "recurrent/sm80_linear_attention_chunk.cuh"
#include "recurrent/sm80_linear_attention_scan.cuh"

namespace trt_nvfp4::recurrent {
namespace {

// Calls f with the smallest size of keys, up to kMost, that the kernels are compiled for and that holds `key_dim`.
template <int kMost, typename F>
auto dispatch_key_dim(int64_t key_dim, F&& f) {
    if (key_dim <= 64) return f(std::integral_constant<int, 64>{});
    if constexpr (kMost > 128) {
        if (key_dim > 128) return f(std::integral_constant<int, kMost>{});
    }
    return f(std::integral_constant<int, 128>{});
}

template <typename T, int kKeyDim, bool kDelta>
TrtNvfp4Status launch_chunk(Args<T> const& args, ChunkWorkspace const& workspace, int chunk0, int chunks,
                            cudaStream_t stream) {
    return launch_kernel(sm80_linear_attention_chunk<T, kKeyDim, kDelta>, dim3(chunks, args.kv_heads, args.batch),
                         kChunkThreads, ChunkSizes<kKeyDim>::shared(kDelta), true, stream,
                         "sm80_linear_attention_chunk", args, workspace, chunk0);
}

template <typename T, int kKeyDim, bool kDelta>
TrtNvfp4Status launch_scan(Args<T> const& args, ChunkWorkspace const& workspace, int chunk0, int chunks,
                           cudaStream_t stream) {
    int device = 0, bytes = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute"));
    using Sizes = ScanSizes<kKeyDim, kDelta>;
    constexpr int kStatic = 1024;  // what the kernel has beside
    int const stages = std::clamp((bytes - kStatic - Sizes::kOnce) / Sizes::kStage, 1, kMostStages);
    unsigned const blocks = (args.value_dim + kScanColumns - 1) / kScanColumns * args.kv_heads;
    auto* const kernel = sm80_linear_attention_scan<T, kKeyDim, kDelta>;
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, Sizes::shared(stages), "sm80_linear_attention_scan"));
    return launch_allowed(kernel, dim3(blocks, args.batch), 1, kScanThreads, Sizes::shared(stages), true, stream,
                          "sm80_linear_attention_scan", args, workspace, chunk0, chunks, stages);
}

}  // namespace

int64_t chunked_shared_bytes(int64_t key_dim, bool delta) {
    if (delta) {
        return dispatch_key_dim<kMaxChunkedDeltaKeys>(
            key_dim, [](auto size) -> int64_t { return ScanSizes<decltype(size)::value, true>::shared(1); });
    }
    return dispatch_key_dim<kMaxDim>(
        key_dim, [](auto size) -> int64_t { return ScanSizes<decltype(size)::value, false>::shared(1); });
}

template <typename T>
TrtNvfp4Status launch_chunked(Args<T> const& args, ChunkWorkspace const& workspace, cudaStream_t stream) {
    auto const launch = [&](auto size, auto delta) {
        constexpr int kKeyDim = decltype(size)::value;
        constexpr bool kDelta = decltype(delta)::value;
        int const all = (args.tokens + kChunk - 1) / kChunk;
        Args<T> part = args;
        for (int chunk0 = 0; chunk0 < all; chunk0 += static_cast<int>(workspace.chunks)) {
            int const chunks = static_cast<int>(std::min<int64_t>(workspace.chunks, all - chunk0));
            TRT_NVFP4_RETURN_IF_ERROR((launch_chunk<T, kKeyDim, kDelta>(part, workspace, chunk0, chunks, stream)));
            TRT_NVFP4_RETURN_IF_ERROR((launch_scan<T, kKeyDim, kDelta>(part, workspace, chunk0, chunks, stream)));
            part.past = args.present;
        }
        return TRT_NVFP4_SUCCESS;
    };
    if (args.beta_heads > 0) {
        return dispatch_key_dim<kMaxChunkedDeltaKeys>(args.key_dim,
                                                      [&](auto size) { return launch(size, std::true_type{}); });
    }
    return dispatch_key_dim<kMaxDim>(args.key_dim, [&](auto size) { return launch(size, std::false_type{}); });
}

template TrtNvfp4Status launch_chunked<__half>(Args<__half> const&, ChunkWorkspace const&, cudaStream_t);
template TrtNvfp4Status launch_chunked<__nv_bfloat16>(Args<__nv_bfloat16> const&, ChunkWorkspace const&, cudaStream_t);

}  // namespace trt_nvfp4::recurrent
