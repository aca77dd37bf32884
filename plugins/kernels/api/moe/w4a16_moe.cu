#include "api/dense/sm90_w4a16.h"
#include "api/launch.h"
#include "api/moe/moe_plan.h"
#include "api/moe/w4a16_moe.h"
#include "device/w4a16_device.h"
#include "heuristics/sm90_moe.h"
#include "w4a16/stream/sm80_w4a16_moe.cuh"

namespace trt_nvfp4::w4a16 {
namespace {

// Tokens of a launch up to which down may be split over blocks; later there are tiles enough.
constexpr int64_t kSplitTokens = 16;

ExpertWeights expert_weights(TrtNvfp4Weight const& weight, int64_t rows, int64_t k) {
    ExpertWeights w{};
    w.codes = static_cast<uint8_t const*>(weight.packed);
    w.scales = static_cast<uint8_t const*>(weight.block_scales);
    w.tensor_scale = weight.tensor_scale;
    w.bias = weight.bias;
    w.rows = static_cast<int>(rows);
    w.k = static_cast<int>(k);
    return w;
}

int64_t up_rows(TrtNvfp4MoeArgs const& args, int64_t intermediate) {
    return args.gated ? 2 * intermediate : intermediate;
}

// Everything behind the plan is erased before a launch.
template <typename T>
struct Layout {
    MoePlan plan;
    T* hidden[2];
    float* outputs[2];
    size_t sentinel, size;  // bytes from the start

    // For the launch's tokens and splits of down.
    Layout(TrtNvfp4MoeArgs const& args, int64_t tokens, int64_t splits, void* base) {
        Workspace workspace(base);
        plan = take_plan(workspace, tokens, args.top_k, args.experts);
        sentinel = workspace.size();
        int64_t const shared = args.shared ? tokens : 0;
        hidden[kRouted] = workspace.take<T>(tokens * args.top_k * args.intermediate);
        hidden[kShared] = workspace.take<T>(shared * args.shared_intermediate);
        outputs[kRouted] = workspace.take<float>(splits * tokens * args.top_k * args.hidden);
        outputs[kShared] = workspace.take<float>(splits * shared * args.hidden);
        size = workspace.size();
    }
};

// A variant of the kernel, and how a launch of it uses an SM.
template <typename T>
struct Variant {
    void (*kernel)(MoeArgs<T>);
    int item_tokens, warps, threads;
    MoeMemory memory;
    int blocks;  // on each SM
};

// The variant for work items of up to 8 * kMostColumns pairs: as many blocks on an SM as registers leave room for, if
// rings of two stages fit.
template <typename T, int kMostColumns>
TrtNvfp4Status divide_memory(int tokens, int chunks, Device const& device, Variant<T>& variant) {
    variant.item_tokens = 8 * kMostColumns;
    variant.kernel = sm80_w4a16_moe<T, kMostColumns>;
    variant.warps = kMoeWarps<kMostColumns>;
    variant.threads = kMoeThreads<kMostColumns>;
    cudaFuncAttributes attributes{};
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaFuncGetAttributes(&attributes, variant.kernel), "cudaFuncGetAttributes"));
    int ordinal = 0, sm_bytes = 0, reserved = 0;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice"));
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal),
                   "cudaDeviceGetAttribute"));
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(
        cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, ordinal), "cudaDeviceGetAttribute"));
    int const fixed = static_cast<int>(attributes.sharedSizeBytes);
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(variant.kernel, device.shared_bytes - fixed, "sm80_w4a16_moe"));
    auto const staged_tile_bytes = item_staged_tile_bytes<T, kMostColumns>;
    int const wanted = std::min(chunks * staged_tile_bytes(std::min(8, item_places(tokens))), kMoeStagedTileBytes);
    variant.memory.stages = 0;
    for (int blocks = kMoeBlocks<kMostColumns>; blocks >= 1 && variant.memory.stages < 2; --blocks) {
        Device share = device;
        share.shared_bytes = std::min(device.shared_bytes, sm_bytes / blocks - reserved);
        variant.memory = divide_moe_memory(wanted, staged_tile_bytes(variant.item_tokens), variant.warps * kStageBytes,
                                           fixed, share);
    }
    return TRT_NVFP4_SUCCESS;
}

template <typename T>
TrtNvfp4Status choose_variant(int columns, int tokens, int chunks, Device const& device, Variant<T>& variant) {
    auto const divide = columns == 1 ? divide_memory<T, 1> : divide_memory<T, kMoeColumns>;
    TRT_NVFP4_RETURN_IF_ERROR(divide(tokens, chunks, device, variant));
    if (variant.memory.stages > 0) return TRT_NVFP4_SUCCESS;
    return record_error(TRT_NVFP4_UNSUPPORTED, "NVFP4MoE: the GPU gives a block " +
                                                   std::to_string(device.shared_bytes) +
                                                   " bytes of shared memory, too few for the W4A16 tactic");
}

template <typename T>
TrtNvfp4Status launch_tokens(TrtNvfp4MoeArgs const& args, Device const& device, void* workspace, cudaStream_t stream) {
    int64_t const tokens = args.m;
    MoeArgs<T> moe{};
    moe.m = static_cast<int>(tokens);
    moe.top_k = args.top_k;
    moe.scale_input = args.scale_input != 0;
    moe.activation = args.activation;
    moe.gated = args.gated != 0;
    moe.alpha = args.alpha;
    moe.limit = args.limit;
    moe.x = static_cast<T const*>(args.x);
    moe.y = static_cast<T*>(args.y);
    moe.one = 1;
    moe.weights[kUpPhase][kRouted] = expert_weights(args.up, up_rows(args, args.intermediate), args.hidden);
    moe.weights[kDownPhase][kRouted] = expert_weights(args.down, args.hidden, args.intermediate);
    moe.weights[kUpPhase][kShared] =
        expert_weights(args.shared_up, up_rows(args, args.shared_intermediate), args.hidden);
    moe.weights[kDownPhase][kShared] = expert_weights(args.shared_down, args.hidden, args.shared_intermediate);

    float const items = expected_experts(static_cast<int>(args.experts), args.top_k, moe.m);
    int const most_chunks =
        std::max(moe.weights[kUpPhase][kRouted].chunks(), moe.weights[kDownPhase][kRouted].chunks());
    Variant<T> variant{};
    int const columns = moe_columns(moe.m, args.top_k, args.experts, most_chunks);
    TRT_NVFP4_RETURN_IF_ERROR(choose_variant(columns, moe.m, most_chunks, device, variant));
    moe.item_tokens = variant.item_tokens;
    moe.memory = variant.memory;
    moe.warps = variant.warps;
    int const bytes = moe.memory.stages * moe.warps * kStageBytes + moe.memory.staged_tile_bytes;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&variant.blocks, variant.kernel, variant.threads, bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor"));
    int const most_splits = tokens <= kSplitTokens ? kMoeMaxSplits : 1;
    for (int phase : {kUpPhase, kDownPhase}) {
        ExpertWeights* const w = moe.weights[phase];
        float tiles = items * static_cast<float>(w[kRouted].tiles());
        int splits = phase == kUpPhase ? 1 : most_splits;
        if (args.shared) {
            tiles += static_cast<float>(w[kShared].tiles());
            splits = std::min(splits, w[kShared].chunks());
        }
        moe.split[phase] =
            choose_moe_split(tiles, w[kRouted].chunks(), moe.m, splits, moe.warps, variant.blocks, device);
        for (int segment : {kRouted, kShared}) {
            w[segment].tasks_per_item =
                ceil_div(w[segment].tiles(), moe.warps / moe.split[phase].k_groups) * moe.split[phase].splits;
        }
    }
    moe.shared_items = args.shared ? ceil_div(moe.m, moe.item_tokens) : 0;
    Layout<T> const layout(args, tokens, moe.split[kDownPhase].splits, workspace);
    moe.plan = layout.plan;
    std::copy_n(layout.hidden, 2, moe.hidden);
    std::copy_n(layout.outputs, 2, moe.outputs);

    RouteArgs route = route_args(args, layout.plan, 0, tokens, moe.item_tokens);
    route.sentinel = static_cast<uint8_t*>(workspace) + layout.sentinel;
    route.sentinel_bytes = static_cast<int64_t>(layout.size - layout.sentinel);
    TRT_NVFP4_RETURN_IF_ERROR(launch_plan<T>(route, stream));

    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(device.sm_count * variant.blocks);
    config.blockDim = static_cast<unsigned>(variant.threads);
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    cudaLaunchAttribute cooperative = cooperative_attribute();
    if (device.cooperative) {
        config.attrs = &cooperative;
        config.numAttrs = 1;
    }
    // Where the GPU cannot promise co-residency, a phase per launch: then no block waits for another.
    int const phases = device.cooperative ? kMoePhases : 1;
    for (moe.first_phase = 0; moe.first_phase < kMoePhases; moe.first_phase += phases) {
        moe.last_phase = moe.first_phase + phases;
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaLaunchKernelEx(&config, variant.kernel, moe), "sm80_w4a16_moe"));
    }
    return TRT_NVFP4_SUCCESS;
}

// The call's tokens from `first` on, at most `tokens`.
TrtNvfp4MoeArgs block_of(TrtNvfp4MoeArgs const& args, int64_t first, int64_t tokens) {
    constexpr int64_t kElement = 2;
    TrtNvfp4MoeArgs block = args;
    block.m = std::min(tokens, args.m - first);
    block.x = static_cast<uint8_t const*>(args.x) + first * args.hidden * kElement;
    block.y = static_cast<uint8_t*>(args.y) + first * args.hidden * kElement;
    block.router_logits = args.router_logits + first * args.experts;
    return block;
}

}  // namespace

bool serves(TrtNvfp4MoeArgs const& args) {
    // The kernel counts the cost of a phase's tasks in 32 bits; at any number of tokens alike.
    int64_t const width = std::max(args.intermediate, args.shared ? args.shared_intermediate : 0);
    int64_t const tiles = std::max(up_rows(args, width), args.hidden) / kTileRows + kTilesPerGroup;
    for (int64_t item_tokens : {8, 8 * kMoeColumns}) {
        int64_t const items = most_items(kMoeTokens * args.top_k, args.experts, item_tokens) + kMoeTokens / item_tokens;
        if (items * tiles * kMoeMaxSplits * item_cost(static_cast<int>(item_tokens)) > INT32_MAX) return false;
    }
    // Copies are 16 bytes: 32 codes of a row.
    return args.dtype != TRT_NVFP4_FLOAT32 && !args.quantize_activations && args.hidden % 32 == 0 &&
           args.intermediate % 32 == 0 && (!args.shared || args.shared_intermediate % 32 == 0);
}

bool takes_sm90(TrtNvfp4MoeArgs const& args) { return sm90::takes(block_of(args, 0, sm90::kMixtureTokens)); }

bool serves_sm90(TrtNvfp4MoeArgs const& args) { return sm90::serves(block_of(args, 0, sm90::kMixtureTokens)); }

size_t workspace_bytes(TrtNvfp4MoeArgs const& args) {
    if (!serves(args)) return 0;
    size_t const split = Layout<__half>(args, std::min(args.m, kSplitTokens), kMoeMaxSplits, nullptr).size;
    size_t const whole = Layout<__half>(args, std::min<int64_t>(args.m, kMoeTokens), 1, nullptr).size;
    return std::max({split, whole, sm90::workspace_bytes(args)});
}

TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    Device device{};
    TRT_NVFP4_RETURN_IF_ERROR(read_device(stream, device));
    for (int64_t first = 0; first < args.m;) {
        TrtNvfp4MoeArgs block = block_of(args, first, sm90::kMixtureTokens);
        bool const own = args.tactic == TRT_NVFP4_TACTIC_W4A16_SM90;
        if (own || (args.tactic != TRT_NVFP4_TACTIC_W4A16_MMA_SYNC && sm90::takes(block))) {
            TRT_NVFP4_RETURN_IF_ERROR(sm90::launch(block, workspace, stream));
        } else {
            block = block_of(args, first, kMoeTokens);
            TRT_NVFP4_RETURN_IF_ERROR(args.dtype == TRT_NVFP4_FLOAT16
                                          ? launch_tokens<__half>(block, device, workspace, stream)
                                          : launch_tokens<__nv_bfloat16>(block, device, workspace, stream));
        }
        first += block.m;
    }
    return TRT_NVFP4_SUCCESS;
}

}  // namespace trt_nvfp4::w4a16
