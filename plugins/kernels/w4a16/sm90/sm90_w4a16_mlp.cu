#include "api/dense/sm90_w4a16.h"
#include "common/programmatic_launch.cuh"
#include "device/memory_bandwidth.h"
#include "w4a16/sm90/common/launch.cuh"
#include "w4a16/sm90/common/weight_maps.h"
#include "w4a16/sm90/sm90_w4a16_mlp.cuh"

namespace trt_nvfp4::sm90 {
namespace {

constexpr int kEraseThreads = 256;

// Before sm90_w4a16_mlp: zeros to the first of all 16-byte units, and sentinels to the others.
__global__ __launch_bounds__(kEraseThreads) void sm90_w4a16_erase(uint4* units, int64_t zeros, int64_t all) {
    ptx::launch_next();
    ptx::await_previous_launch();
    int64_t const step = int64_t{kEraseThreads} * gridDim.x;
    for (int64_t i = int64_t{kEraseThreads} * blockIdx.x + threadIdx.x; i < all; i += step) {
        uint32_t const word = i < zeros ? 0u : w4a16::kSentinelByte * 0x01010101u;
        units[i] = make_uint4(word, word, word, word);
    }
}

// Tokens that the kernel serving `m` is made for.
int mlp_tokens(int64_t m) { return m == 1 ? 1 : tokens_of(m); }

// One layout for the query and the launch. Before a launch what comes before `zeroed` is zero; what lies between that
// and the end of the partial sums says itself whether it has been written, and starts as sentinels.
struct Pieces {
    Counts counts;
    uint8_t* image;
    uint8_t* hidden;
    size_t zeroed;
    float* partials;
    float2* squares;
    size_t size;

    Pieces(TrtNvfp4MlpArgs const& args, void* base) {
        Workspace workspace(base);
        int const tokens = mlp_tokens(args.m), sums = std::max(tokens, 8);
        int const in = static_cast<int>(args.hidden_in), out = static_cast<int>(args.hidden_out);
        int const intermediate = static_cast<int>(args.intermediate);
        counts.image = workspace.take<uint32_t>(chunks_of(in));
        counts.hidden = workspace.take<uint32_t>(chunks_of(intermediate));
        counts.squares = workspace.take<uint32_t>(1);
        bool const flags = tokens <= kFlagTokens;
        auto const take_hidden = [&](int64_t images) {
            hidden = workspace.take<uint8_t>(images * image_bytes(intermediate, tokens));
        };
        if (flags) zeroed = workspace.size();
        image = workspace.take<uint8_t>((flags ? args.layers : 1) * image_bytes(in, tokens));
        // Nothing is written for tokens and columns of padding.
        if (!flags) zeroed = workspace.size();
        if (flags) take_hidden(args.layers);
        squares = workspace.take<float2>(int64_t{sums} / 2 * tiles_of(in) * kUnitsPerTile);
        partials = workspace.take<float>(most_partials(out, sums));
        if (!flags) take_hidden(1);
        size = workspace.size();
    }
};

// Writes what is zero or a sentinel before a launch, up to `end`, by at most so many blocks.
TrtNvfp4Status erase(Pieces const& pieces, float const* end, int blocks, cudaStream_t stream) {
    // Counts are the first piece, where the workspace begins, and all pieces are whole units.
    auto* const units = reinterpret_cast<uint4*>(pieces.counts.image);
    int64_t const zeros = static_cast<int64_t>(pieces.zeroed / sizeof(uint4));
    int64_t const all = reinterpret_cast<uint4 const*>(end) - units;
    int64_t const most = (all + kEraseThreads - 1) / kEraseThreads;
    return launch_kernel(sm90_w4a16_erase, static_cast<int>(std::min<int64_t>(blocks, most)), kEraseThreads, 0, true,
                         stream, "sm90_w4a16_erase", units, zeros, all);
}

template <typename T, int kTokens>
TrtNvfp4Status run(TrtNvfp4MlpArgs const& mlp, Pieces const& pieces, cudaStream_t stream) {
    auto const kernel = sm90_w4a16_mlp<T, kTokens>;
    char const* const name = "sm90_w4a16_mlp";
    constexpr size_t shared = sizeof(MlpShared<T, kTokens>);
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, shared, name));
    cudaLaunchAttribute attributes[3]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {kMaxCluster, 1, 1};
    attributes[1] = cooperative_attribute();
    attributes[2] = programmatic_attribute();
    cudaLaunchConfig_t config{};
    config.gridDim = kMaxCluster;
    config.blockDim = kTaskThreads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 1;
    int clusters = 0;
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters"));
    int all_sms = 0, sms = 0;
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(all_sms));
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, sms));
    clusters = std::min(clusters, sms / kMaxCluster);
    if (clusters == 0) {
        return record_error(TRT_NVFP4_UNSUPPORTED, "W4A16: the GPU has no room for two blocks of " +
                                                       std::to_string(shared) +
                                                       " bytes of shared memory; use tactic W4A16_MMA_SYNC");
    }

    MlpArgs<T> args{};
    int64_t const up_rows = mlp.gated ? 2 * mlp.intermediate : mlp.intermediate;
    TRT_NVFP4_RETURN_IF_ERROR(make_projection(args.up, mlp.up, mlp.layers, up_rows, mlp.hidden_in, kBoxAlone));
    args.up.split = {kMaxCluster, 1};
    args.up.x = pieces.image;
    args.up.x_step = kValuesAreFlags<kTokens> ? image_bytes(args.up.k, kTokens) : 0;
    args.up.activation = mlp.activation;
    args.up.gated = mlp.gated != 0;
    args.up.alpha = mlp.alpha;
    args.up.limit = mlp.limit;
    args.up.padded_width = chunks_of(static_cast<int>(mlp.intermediate)) * kChunk;
    TRT_NVFP4_RETURN_IF_ERROR(
        make_projection(args.down, mlp.down, mlp.layers, mlp.hidden_out, mlp.intermediate, kBoxAlone));
    args.down.split = choose_split(args.down.rows, chunks_of(args.down.k), kMaxCluster, clusters);
    args.down.x = pieces.hidden;
    args.down.x_step = kValuesAreFlags<kTokens> ? image_bytes(args.down.k, kTokens) : 0;
    args.layers = static_cast<int>(mlp.layers);
    args.tasks[0] = args.up.split.tasks(args.up.rows);
    args.tasks[1] = args.down.split.tasks(args.down.rows);
    args.splits[0] = Divisor(args.up.split.splits);
    args.splits[1] = Divisor(args.down.split.splits);
    args.m = static_cast<int>(mlp.m);
    args.columns = Divisor(row_columns<kTokens>(args.m));
    args.one = 1;
    float bandwidth = 0.0f;
    TRT_NVFP4_RETURN_IF_ERROR(read_memory_bandwidth(bandwidth));
    args.ahead = choose_ahead(kStageCodes + kStageScales, all_sms, bandwidth);
    args.x = static_cast<T const*>(mlp.x);
    args.y = static_cast<T*>(mlp.y);
    args.norm_weight = mlp.norm ? static_cast<T const*>(mlp.norm_weight) : nullptr;
    args.epsilon = mlp.epsilon;
    args.residual = mlp.residual != 0;
    args.partials = reinterpret_cast<float2*>(pieces.partials);
    args.squares = pieces.squares;
    args.counts = pieces.counts;

    int64_t const sums =
        int64_t{kSumTokens<kTokens>} * padded_rows(args.down.rows, kMaxCluster) * args.down.split.splits;
    TRT_NVFP4_RETURN_IF_ERROR(erase(pieces, pieces.partials + sums, 4 * clusters, stream));
    int const most = std::max(args.tasks[0], args.tasks[1]);
    config.gridDim = static_cast<unsigned>(std::min(most, clusters) * kMaxCluster);
    config.numAttrs = 3;
    return check_cuda(cudaLaunchKernelEx(&config, kernel, args), name);
}

template <typename T>
TrtNvfp4Status run_as(TrtNvfp4MlpArgs const& args, Pieces const& pieces, cudaStream_t stream) {
    if (args.m == 1) return run<T, 1>(args, pieces, stream);
    return with_tokens(args.m, [&](auto tokens) { return run<T, tokens()>(args, pieces, stream); });
}

}  // namespace

bool serves(TrtNvfp4MlpArgs const& args) { return args.m <= kMaxTokens && gpu_is_sm90(); }

bool takes(TrtNvfp4MlpArgs const& args) {
    int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
    int sms = 0;
    return serves(args) && read_sms(sms) == TRT_NVFP4_SUCCESS &&
           takes_layers(static_cast<int>(args.m), static_cast<int>(up_rows), static_cast<int>(args.hidden_in),
                        args.norm != 0, sms);
}

size_t workspace_bytes(TrtNvfp4MlpArgs const& args) {
    // Enough for fewer tokens too, of which images are each layer's own.
    TrtNvfp4MlpArgs few = args;
    few.m = std::min<int64_t>(args.m, kFlagTokens);
    return std::max(Pieces(args, nullptr).size, Pieces(few, nullptr).size);
}

TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    Pieces const pieces(args, workspace);
    return args.dtype == TRT_NVFP4_FLOAT16 ? run_as<__half>(args, pieces, stream)
                                           : run_as<__nv_bfloat16>(args, pieces, stream);
}

}  // namespace trt_nvfp4::sm90
