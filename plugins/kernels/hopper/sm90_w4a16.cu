#include "../api/sm90_w4a16.h"
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

template <typename T>
TrtNvfp4Status launch_rows(Chain& chain, RowArgs<T> const& rows, int tokens) {
    int const parts = rows.norm_weight != nullptr ? 1 : std::min(kRowBlocks / tokens, chunks_of(rows.width));
    dim3 const blocks(static_cast<unsigned>(tokens), static_cast<unsigned>(parts));
    return chain.launch(sm90_w4a16_rows<T>, rows, blocks, kRowThreads, 1,
                        std::max(kRowSharedBytes, rows.width * sizeof(T)), "sm90_w4a16_rows");
}

// The sums of a projection that split K, to be finished.
template <typename T>
RowArgs<T> finish(GemmArgs<T> const& gemm, float const* partials) {
    RowArgs<T> rows{};
    rows.width = gemm.gated ? gemm.rows / 2 : gemm.rows;
    rows.m = gemm.m;
    rows.partials = partials;
    rows.splits = gemm.split.splits;
    rows.pitch = padded_rows(gemm.rows, gemm.split.cluster);
    rows.tensor_scale = gemm.tensor_scale;
    rows.bias = gemm.bias;
    rows.activation = gemm.activation;
    rows.gated = gemm.gated;
    rows.alpha = gemm.alpha;
    rows.limit = gemm.limit;
    return rows;
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

struct MlpWorkspace {
    uint8_t* image;
    uint8_t* hidden;
    float* partials;
    size_t size;

    MlpWorkspace(TrtNvfp4MlpArgs const& args, void* base) {
        Workspace workspace(base);
        int const tokens = tokens_of(args.m);
        int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
        image = workspace.take<uint8_t>(image_bytes(static_cast<int>(args.hidden_in), tokens));
        hidden = workspace.take<uint8_t>(image_bytes(static_cast<int>(args.intermediate), tokens));
        partials =
            workspace.take<float>(std::max(most_partials(up_rows, tokens), most_partials(args.hidden_out, tokens)));
        size = workspace.size();
    }
};

template <typename T, int kTokens>
TrtNvfp4Status run(TrtNvfp4LinearArgs const& args, LinearWorkspace const& workspace, cudaStream_t stream) {
    int clusters = 0;
    TRT_NVFP4_RETURN_IF_ERROR((active_clusters<T, kTokens>(kMaxCluster, clusters)));
    Chain chain(stream);
    RowArgs<T> rows{};
    rows.width = static_cast<int>(args.k);
    rows.m = static_cast<int>(args.m);
    rows.x = static_cast<T const*>(args.x);
    rows.image = workspace.image;
    TRT_NVFP4_RETURN_IF_ERROR(launch_rows(chain, rows, kTokens));

    GemmArgs<T> gemm = make_gemm<T>(args.weight, args.n, args.k, args.m, 0);
    gemm.split = choose_split(gemm.rows, chunks_of(gemm.k), kMaxCluster, clusters);
    gemm.x = workspace.image;
    gemm.activation = args.activation;
    bool const split = gemm.split.splits > 1;
    gemm.partials = split ? workspace.partials : nullptr;
    gemm.y = static_cast<T*>(args.y);
    TRT_NVFP4_RETURN_IF_ERROR((launch_gemm<T, kTokens>(chain, gemm, clusters)));
    if (!split) return TRT_NVFP4_SUCCESS;
    RowArgs<T> last = finish(gemm, workspace.partials);
    last.y = gemm.y;
    return launch_rows(chain, last, kTokens);
}

template <typename T, int kTokens>
TrtNvfp4Status run(TrtNvfp4MlpArgs const& args, MlpWorkspace const& workspace, cudaStream_t stream) {
    int clusters = 0;
    TRT_NVFP4_RETURN_IF_ERROR((active_clusters<T, kTokens>(kMaxCluster, clusters)));
    Chain chain(stream);
    auto const norm_weight = [&](int64_t layer) {
        return args.norm ? static_cast<T const*>(args.norm_weight) + layer * args.hidden_in : nullptr;
    };
    RowArgs<T> rows{};
    rows.width = static_cast<int>(args.hidden_in);
    rows.m = static_cast<int>(args.m);
    rows.x = static_cast<T const*>(args.x);
    rows.image = workspace.image;
    rows.norm_weight = norm_weight(0);
    rows.epsilon = args.epsilon;
    TRT_NVFP4_RETURN_IF_ERROR(launch_rows(chain, rows, kTokens));

    for (int64_t layer = 0; layer < args.layers; ++layer) {
        int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
        GemmArgs<T> up = make_gemm<T>(args.up, up_rows, args.hidden_in, args.m, layer);
        up.split = choose_split(up.rows, chunks_of(up.k), kMaxCluster, clusters);
        up.x = workspace.image;
        up.activation = args.activation;
        up.gated = args.gated != 0;
        up.alpha = args.alpha;
        up.limit = args.limit;
        bool const split = up.split.splits > 1;
        up.partials = split ? workspace.partials : nullptr;
        up.image = split ? nullptr : workspace.hidden;
        up.padded_width = chunks_of(static_cast<int>(args.intermediate)) * kChunk;
        TRT_NVFP4_RETURN_IF_ERROR((launch_gemm<T, kTokens>(chain, up, clusters)));
        if (split) {
            RowArgs<T> hidden = finish(up, workspace.partials);
            hidden.image = workspace.hidden;
            TRT_NVFP4_RETURN_IF_ERROR(launch_rows(chain, hidden, kTokens));
        }

        GemmArgs<T> down = make_gemm<T>(args.down, args.hidden_out, args.intermediate, args.m, layer);
        down.split = choose_split(down.rows, chunks_of(down.k), kMaxCluster, clusters);
        down.x = workspace.hidden;
        down.partials = workspace.partials;
        TRT_NVFP4_RETURN_IF_ERROR((launch_gemm<T, kTokens>(chain, down, clusters)));
        RowArgs<T> out = finish(down, workspace.partials);
        T const* const x = static_cast<T const*>(layer == 0 ? args.x : args.y);
        bool const last = layer + 1 == args.layers;
        out.residual = args.residual ? x : nullptr;
        out.y = last || args.residual ? static_cast<T*>(args.y) : nullptr;
        if (!last) {
            out.image = workspace.image;
            out.norm_weight = norm_weight(layer + 1);
            out.epsilon = args.epsilon;
        }
        TRT_NVFP4_RETURN_IF_ERROR(launch_rows(chain, out, kTokens));
    }
    return TRT_NVFP4_SUCCESS;
}

template <typename Args, typename Pieces>
TrtNvfp4Status dispatch(Args const& args, Pieces const& workspace, cudaStream_t stream) {
    bool const few = args.m <= 32;
    if (args.dtype == TRT_NVFP4_FLOAT16) {
        return few ? run<__half, 32>(args, workspace, stream) : run<__half, 64>(args, workspace, stream);
    }
    return few ? run<__nv_bfloat16, 32>(args, workspace, stream) : run<__nv_bfloat16, 64>(args, workspace, stream);
}

// SM90, token counts that mma.sync is too slow for, and rows that fit in shared memory.
bool serves_gpu(int64_t m, int64_t widest) {
    return m >= kMinTokens && m <= kMaxTokens && widest <= 65536 && gpu_is_sm90();
}

}  // namespace

bool serves(TrtNvfp4LinearArgs const& args) { return serves_gpu(args.m, std::max(args.k, args.n)); }

bool serves(TrtNvfp4MlpArgs const& args) {
    return serves_gpu(args.m, std::max({args.hidden_in, args.intermediate, args.hidden_out}));
}

size_t workspace_bytes(TrtNvfp4LinearArgs const& args) { return LinearWorkspace(args, nullptr).size; }
size_t workspace_bytes(TrtNvfp4MlpArgs const& args) { return MlpWorkspace(args, nullptr).size; }

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return dispatch(args, LinearWorkspace(args, workspace), stream);
}

TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return dispatch(args, MlpWorkspace(args, workspace), stream);
}

}  // namespace trt_nvfp4::sm90
