#include "../api/sm90_w4a16.h"
#include "../sm90_w4a16_gemm.cuh"
#include "../sm90_w4a16_launch.cuh"
#include "../sm90_w4a16_rows.cuh"

namespace trt_nvfp4::sm90 {
namespace {

int tokens_of(int64_t m) { return m <= 32 ? 32 : 64; }

// The chain of launches of one call. All but its first may begin before the one before has finished.
class Chain {
 public:
    explicit Chain(cudaStream_t stream) : stream_(stream) {}

    template <typename Args>
    TrtNvfp4Status launch(void (*kernel)(Args), Args const& args, dim3 blocks, int threads, int cluster, size_t shared,
                          char const* what) {
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), what));
        // With other divisions between L1 and shared memory, launches of a chain could not share an SM.
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared),
                       what));
        cudaLaunchAttribute attributes[2]{};
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = blocks;
        config.blockDim = static_cast<unsigned>(threads);
        config.dynamicSmemBytes = shared;
        config.stream = stream_;
        config.attrs = attributes;
        config.numAttrs = begun_ ? 2 : 1;
        begun_ = true;
        return check_cuda(cudaLaunchKernelEx(&config, kernel, args), what);
    }

 private:
    cudaStream_t const stream_;
    bool begun_ = false;
};

// Clusters of `size` blocks that run at once.
template <typename T, int kTokens>
TrtNvfp4Status active_clusters(int size, int& clusters) {
    auto const kernel = sm90_w4a16_gemm<T, kTokens>;
    size_t const shared = sizeof(Shared<kTokens>);
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
                   "sm90_w4a16_gemm"));
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(size);
    config.blockDim = kThreads;
    config.dynamicSmemBytes = shared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
}

template <typename T, int kTokens>
TrtNvfp4Status launch_gemm(Chain& chain, GemmArgs<T> const& gemm, int clusters) {
    int const blocks = std::min(gemm.split.tasks(gemm.rows), clusters) * gemm.split.cluster;
    return chain.launch(sm90_w4a16_gemm<T, kTokens>, gemm, dim3(static_cast<unsigned>(blocks)), kThreads,
                        gemm.split.cluster, sizeof(Shared<kTokens>), "sm90_w4a16_gemm");
}

// With this much shared memory blocks have an SM each: else those that begin early would crowd on the few SMs that the
// launch before leaves free, and share their paths to L2.
constexpr size_t kRowSharedBytes = 128 * 1024;
constexpr int kRowBlocks = 128;

// By `rows` tokens' rows of `units` threads' work each.
template <typename Args>
TrtNvfp4Status launch_rows(Chain& chain, void (*kernel)(Args), Args const& args, int rows, int units,
                           char const* what) {
    int const parts = std::clamp((units + kRowThreads - 1) / kRowThreads, 1, kRowBlocks / rows);
    dim3 const blocks(static_cast<unsigned>(rows), static_cast<unsigned>(parts));
    return chain.launch(kernel, args, blocks, kRowThreads, 1, kRowSharedBytes, what);
}

struct LinearWorkspace {
    uint8_t* image;
    float* partials;
    size_t size;

    LinearWorkspace(TrtNvfp4LinearArgs const& args, void* base) {
        Workspace workspace(base);
        int const tokens = tokens_of(args.m);
        image = workspace.take<uint8_t>(image_bytes(static_cast<int>(args.k), tokens));
        partials = workspace.take<float>(most_partials(args.n, tokens));
        size = workspace.size();
    }
};

template <typename T, int kTokens>
TrtNvfp4Status run(TrtNvfp4LinearArgs const& args, LinearWorkspace const& workspace, cudaStream_t stream) {
    int clusters = 0;
    TRT_NVFP4_RETURN_IF_ERROR((active_clusters<T, kTokens>(kMaxCluster, clusters)));
    Chain chain(stream);
    ImageArgs<T> const image{static_cast<T const*>(args.x), workspace.image, static_cast<int>(args.k),
                             static_cast<int>(args.m)};
    TRT_NVFP4_RETURN_IF_ERROR(launch_rows(chain, sm90_w4a16_image<T>, image, kTokens,
                                          chunks_of(image.width) * (kChunk / 8), "sm90_w4a16_image"));

    GemmArgs<T> gemm{};
    gemm.codes = static_cast<uint8_t const*>(args.weight.packed);
    gemm.scales = static_cast<uint8_t const*>(args.weight.block_scales);
    gemm.tensor_scale = args.weight.tensor_scale;
    gemm.bias = static_cast<T const*>(args.weight.bias);
    gemm.rows = static_cast<int>(args.n);
    gemm.k = static_cast<int>(args.k);
    gemm.m = static_cast<int>(args.m);
    gemm.one = 1;
    gemm.split = choose_split(gemm.rows, chunks_of(gemm.k), kMaxCluster, clusters);
    gemm.x = workspace.image;
    gemm.activation = args.activation;
    bool const split = gemm.split.splits > 1;
    gemm.partials = split ? workspace.partials : nullptr;
    gemm.y = static_cast<T*>(args.y);
    TRT_NVFP4_RETURN_IF_ERROR((launch_gemm<T, kTokens>(chain, gemm, clusters)));
    if (!split) return TRT_NVFP4_SUCCESS;
    SumArgs<T> sum{};
    sum.partials = workspace.partials;
    sum.splits = gemm.split.splits;
    sum.tokens = kTokens;
    sum.pitch = padded_rows(gemm.rows, gemm.split.cluster);
    sum.rows = gemm.rows;
    sum.tensor_scale = gemm.tensor_scale;
    sum.bias = gemm.bias;
    sum.activation = args.activation;
    sum.y = gemm.y;
    return launch_rows(chain, sm90_w4a16_sum<T>, sum, gemm.m, (gemm.rows + 7) / 8, "sm90_w4a16_sum");
}

}  // namespace

bool serves(TrtNvfp4LinearArgs const& args) { return args.m <= kMaxTokens && gpu_is_sm90(); }

bool takes(TrtNvfp4LinearArgs const& args) {
    return serves(args) && takes_linear(static_cast<int>(args.m), args.k, args.dtype == TRT_NVFP4_BFLOAT16);
}

size_t workspace_bytes(TrtNvfp4LinearArgs const& args) {
    return std::max(LinearWorkspace(args, nullptr).size, few_workspace_bytes(args));
}

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    if (args.m <= kFewTokens) return launch_few(args, workspace, stream);
    LinearWorkspace const pieces(args, workspace);
    bool const few = args.m <= 32;
    if (args.dtype == TRT_NVFP4_FLOAT16) {
        return few ? run<__half, 32>(args, pieces, stream) : run<__half, 64>(args, pieces, stream);
    }
    return few ? run<__nv_bfloat16, 32>(args, pieces, stream) : run<__nv_bfloat16, 64>(args, pieces, stream);
}

}  // namespace trt_nvfp4::sm90
