#include <cassert>

#include "api/dense/sm90_w4a16.h"
#include "api/dense/w4a16.h"
#include "api/dense/w4a16_small.h"
#include "api/launch.h"
#include "device/w4a16_device.h"
#include "heuristics/in_flight.h"
#include "w4a16/stream/sm80_w4a16_mlp.cuh"
#include "w4a16/stream/sm80_w4a16_plan.h"
#include "w4a16/stream/sm80_w4a16_token.cuh"

namespace trt_nvfp4::w4a16 {
namespace {

// What a launch lays out in its workspace; everything in it is erased before.
template <typename T, int kProjections>
size_t lay_out(MlpArgs<T, kProjections>& args, void* base) {
    Workspace workspace(base);
    take_partials(args, workspace);
    if (kProjections > 1) {
        args.hidden_ring =
            workspace.take<T>(int64_t{kHiddenBuffers} * args.m * args.program.projections[kProjections - 1].k);
        if (args.layers > 1)
            args.x_ring = workspace.take<T>(int64_t{kXBuffers} * args.m * args.program.projections[0].k);
    }
    return workspace.size();
}

template <typename T, int kProjections>
size_t lay_out(TokenArgs<T, kProjections>& args, void* base) {
    Workspace workspace(base);
    take_partials(args, workspace);
    if (kProjections > 1) {
        args.between[1] = workspace.take<uint32_t>(args.program.projections[kProjections - 1].k);
        if (args.layers > 1) args.between[0] = workspace.take<uint32_t>(args.program.projections[0].k);
    }
    return workspace.size();
}

// A kernel for phases. `chunk_bytes` of shared memory for a chunk of activations; `whole`: warps may not have parts of
// two tiles.
template <typename Args>
struct PhasesKernel {
    void (*function)(Args);
    char const* name;
    int chunk_bytes;
    bool whole;
};

template <typename Args>
TrtNvfp4Status launch_phases(PhasesKernel<Args> const& kernel, Args args, void* workspace, cudaStream_t stream) {
    Device device{};
    TRT_NVFP4_RETURN_IF_ERROR(read_device(stream, device));
    cudaFuncAttributes attributes{};
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes"));
    Footprint const bytes{kWarps * kStageBytes, kernel.chunk_bytes, static_cast<int>(attributes.sharedSizeBytes)};
    int const capacity = staged_tile_capacity(bytes, device);
    if (capacity == 0) {
        return record_error(TRT_NVFP4_UNSUPPORTED, "W4A16: " + std::to_string(args.m) + " tokens need " +
                                                       std::to_string(bytes.fixed + bytes.stage + bytes.chunk) +
                                                       " bytes of shared memory, the GPU gives a block " +
                                                       std::to_string(device.shared_bytes) +
                                                       "; use fewer tokens or the generic tactic");
    }
    constexpr int kProjections = std::extent_v<decltype(Args::surroundings)>;
    // A linear that is split pays a memset and a cooperative launch, which waits for the kernel in front to end.
    float const split_cost = kProjections == 1 ? 8.0f : 2.0f;
    int needed = 0, tasks = 0;
    args.blocks = device.sm_count;
    bool split = false;
    for (Projection& p : args.program.projections) {
        // Layers take turns with one buffer of partial sums. A layer's are read before the next one's are written,
        // because every tile has a row that the next layer waits for; a tile of only padding would not.
        assert(args.layers == 1 || p.rows % kTileRows == 0);
        set_split(p, choose_split({p.tiles(), p.chunks()}, args.m, capacity, split_cost, kernel.whole, device));
        needed = std::max(needed, ceil_div(p.chunks(), p.split.splits));
        tasks = std::max(tasks, p.tasks);
        args.blocks = std::min(args.blocks, p.tasks);
        split |= p.split.splits > 1;
    }
    args.shared = divide_shared_memory(needed, capacity, bytes, device);
    Projection const& first = args.program.projections[0];
    int64_t const block_bytes = static_cast<int64_t>(first.tiles()) * first.chunks() * kStageBytes / device.sm_count;
    int const stages = choose_in_flight(kProducers * kStageBytes, device.sm_count, device.bandwidth);
    args.in_flight = kProjections > 1 ? stages : keeps_few_in_flight(block_bytes) ? kFewInFlight : kManyInFlight;
    args.by_tokens = Divisor(args.m);
    args.one = 1;
    size_t const used = lay_out(args, workspace);
    if (used > 0) {
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(workspace, kSentinelByte, used, stream), "cudaMemsetAsync"));
    }
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel.function, device.shared_bytes - bytes.fixed, kernel.name));

    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min(tasks, device.sm_count));
    config.blockDim = kBlockThreads;
    config.dynamicSmemBytes = static_cast<size_t>(args.shared.bytes);
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    config.attrs = &attribute;
    int const phases = args.layers * kProjections;
    bool const awaits_other_blocks = phases > 1 || split;
    if (awaits_other_blocks && device.cooperative) {
        attribute = cooperative_attribute();
        config.numAttrs = 1;
    } else if (can_start_early(attributes)) {
        attribute = programmatic_attribute();
        config.numAttrs = 1;
    }
    // Where the GPU cannot promise co-residency, a phase per launch: nothing is split then, so no block waits.
    int const phases_per_launch = device.cooperative ? phases : 1;
    for (int phase = 0; phase < phases; phase += phases_per_launch) {
        args.program.first_phase = phase;
        args.program.last_phase = phase + phases_per_launch;
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaLaunchKernelEx(&config, kernel.function, args), kernel.name));
    }
    return TRT_NVFP4_SUCCESS;
}

template <int kColumns, typename T, int kProjections>
TrtNvfp4Status launch_columns(PhasesArgs<T, kProjections> const& args, void* workspace, cudaStream_t stream) {
    PhasesKernel<MlpArgs<T, kProjections>> const kernel{sm80_w4a16_mlp<T, kColumns, kProjections>, "sm80_w4a16_mlp",
                                                        Product<T, kColumns>::chunk_bytes(args.m),
                                                        !kSharesWarps<kColumns>};
    return launch_phases(kernel, MlpArgs<T, kProjections>{args}, workspace, stream);
}

template <typename T, int kProjections>
TrtNvfp4Status launch_tokens(PhasesArgs<T, kProjections> const& args, void* workspace, cudaStream_t stream) {
    if (args.m == 1) {
        PhasesKernel<TokenArgs<T, kProjections>> const kernel{sm80_w4a16_token<T, kProjections>, "sm80_w4a16_token",
                                                              kTokenChunkBytes, false};
        return launch_phases(kernel, TokenArgs<T, kProjections>{args}, workspace, stream);
    }
    if (args.m <= 8) return launch_columns<1>(args, workspace, stream);
    if (args.m <= 16) return launch_columns<2>(args, workspace, stream);
    return launch_columns<4>(args, workspace, stream);
}

template <typename T>
TrtNvfp4Status launch_as(TrtNvfp4LinearArgs const& linear, void* workspace, cudaStream_t stream) {
    PhasesArgs<T, 1> args{};
    args.program.projections[0] = make_projection(linear.weight, linear.n, linear.k);
    args.surroundings[0].activation = linear.activation;
    args.layers = 1;
    args.m = static_cast<int>(linear.m);
    args.x = static_cast<T const*>(linear.x);
    args.y = static_cast<T*>(linear.y);
    return launch_tokens(args, workspace, stream);
}

template <typename T>
TrtNvfp4Status launch_as(TrtNvfp4MlpArgs const& mlp, void* workspace, cudaStream_t stream) {
    PhasesArgs<T, 2> args{};
    int64_t const up_rows = mlp.gated ? 2 * mlp.intermediate : mlp.intermediate;
    args.program.projections[0] = make_projection(mlp.up, up_rows, mlp.hidden_in);
    args.program.projections[1] = make_projection(mlp.down, mlp.hidden_out, mlp.intermediate);
    args.surroundings[0] = {mlp.norm ? static_cast<T const*>(mlp.norm_weight) : nullptr, mlp.activation, mlp.gated != 0,
                            false};
    args.surroundings[1].residual = mlp.residual != 0;
    args.layers = static_cast<int>(mlp.layers);
    args.m = static_cast<int>(mlp.m);
    args.epsilon = mlp.epsilon;
    args.alpha = mlp.alpha;
    args.limit = mlp.limit;
    args.x = static_cast<T const*>(mlp.x);
    args.y = static_cast<T*>(mlp.y);
    return launch_tokens(args, workspace, stream);
}

template <typename Args>
TrtNvfp4Status launch_dtype(Args const& args, void* workspace, cudaStream_t stream) {
    return args.dtype == TRT_NVFP4_FLOAT16 ? launch_as<__half>(args, workspace, stream)
                                           : launch_as<__nv_bfloat16>(args, workspace, stream);
}

// The tokens from `first` on that go in one block; a token does not see the others. Rows of x and y have these widths.
template <typename Args>
Args block_of(Args const& args, int64_t first, int64_t tokens, int64_t x_width, int64_t y_width) {
    Args block = args;
    block.m = std::min(args.m - first, tokens);
    block.x = static_cast<uint16_t const*>(args.x) + first * x_width;
    block.y = static_cast<uint16_t*>(args.y) + first * y_width;
    return block;
}

template <typename Args>
TrtNvfp4Status launch_blocks(Args const& args, int64_t x_width, int64_t y_width, void* workspace, cudaStream_t stream) {
    for (int64_t first = 0; first < args.m;) {
        Args block = block_of(args, first, kMaxTokens, x_width, y_width);
        bool const own = args.tactic == TRT_NVFP4_TACTIC_W4A16_SM90;
        bool const streaming = args.tactic == TRT_NVFP4_TACTIC_W4A16_MMA_SYNC;
        if (!own && !streaming && takes_small(block)) {
            TRT_NVFP4_RETURN_IF_ERROR(launch_small(block, stream));
        } else if (own || (!streaming && sm90::takes(block))) {
            TRT_NVFP4_RETURN_IF_ERROR(sm90::launch(block, workspace, stream));
        } else {
            block.m = std::min<int64_t>(block.m, kMaxMmaTokens);
            TRT_NVFP4_RETURN_IF_ERROR(launch_dtype(block, workspace, stream));
        }
        first += block.m;
    }
    return TRT_NVFP4_SUCCESS;
}

}  // namespace

bool takes_sm90(TrtNvfp4LinearArgs const& args) {
    TrtNvfp4LinearArgs const block = block_of(args, 0, kMaxTokens, args.k, args.n);
    return !takes_small(block) && sm90::takes(block);
}

bool takes_sm90(TrtNvfp4MlpArgs const& args) {
    return sm90::takes(block_of(args, 0, kMaxTokens, args.hidden_in, args.hidden_out));
}

bool serves_sm90(TrtNvfp4LinearArgs const& args) { return sm90::serves(block_of(args, 0, kMaxTokens, args.k, args.n)); }

bool serves_sm90(TrtNvfp4MlpArgs const& args) {
    return sm90::serves(block_of(args, 0, kMaxTokens, args.hidden_in, args.hidden_out));
}

size_t workspace_bytes(TrtNvfp4LinearArgs const& args) {
    if (!serves(args)) return 0;
    TrtNvfp4LinearArgs const most = block_of(args, 0, kMaxTokens, args.k, args.n);
    Workspace workspace;
    workspace.take<Partial>(most_partials(args.n, args.k, most.m));
    return std::max(workspace.size(), sm90::workspace_bytes(most));
}

size_t workspace_bytes(TrtNvfp4MlpArgs const& args) {
    if (!serves(args)) return 0;
    TrtNvfp4MlpArgs const most = block_of(args, 0, kMaxTokens, args.hidden_in, args.hidden_out);
    Workspace workspace;
    int64_t const up_rows = args.gated ? 2 * args.intermediate : args.intermediate;
    workspace.take<Partial>(most_partials(up_rows, args.hidden_in, most.m));
    workspace.take<Partial>(most_partials(args.hidden_out, args.intermediate, most.m));
    workspace.take<__half>(kHiddenBuffers * most.m * args.intermediate);
    workspace.take<__half>(kXBuffers * most.m * args.hidden_in);
    return std::max(workspace.size(), sm90::workspace_bytes(most));
}

TrtNvfp4Status launch(TrtNvfp4LinearArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return launch_blocks(args, args.k, args.n, workspace, stream);
}

TrtNvfp4Status launch(TrtNvfp4MlpArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return launch_blocks(args, args.hidden_in, args.hidden_out, workspace, stream);
}

}  // namespace trt_nvfp4::w4a16
