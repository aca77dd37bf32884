#include <algorithm>

#include "api/attention/attention_args.h"
#include "api/attention/decoder_layers.h"
#include "common/programmatic_launch.cuh"
#include "decoder/launch.h"
#include "device/w4a16_device.h"
#include "w4a16/stream/sm80_w4a16_plan.h"

namespace trt_nvfp4::decoder {
namespace {

using w4a16::ceil_div;

constexpr int kMostBlocks = 256;  // of every GPU, for workspaces that are sized before it is known
// Stages of each ring that keys and values leave, where shared memory allows it.
constexpr int kFewestStages = 3;

int64_t tokens_of(TrtNvfp4DecoderArgs const& args) { return args.batch * args.tokens; }
int64_t qkv_rows(TrtNvfp4DecoderArgs const& args) { return (args.heads + 2 * args.kv_heads) * args.head_dim; }
// Hidden values of the MLP, or of all chosen experts.
int64_t hidden_values(TrtNvfp4DecoderArgs const& args) {
    return args.intermediate * (args.experts > 0 ? args.top_k : 1);
}

// In the order of Which: rows and K.
struct Sizes {
    int64_t rows[kProjections], k[kProjections];

    explicit Sizes(TrtNvfp4DecoderArgs const& args)
        : rows{qkv_rows(args), args.hidden, 2 * hidden_values(args), args.hidden},
          k{args.hidden, args.heads * args.head_dim, args.hidden, hidden_values(args)} {}
};

// Pairs of a KV head and up to kRows rows of it, and the rows of one.
struct Pairs {
    int count, rows;

    explicit Pairs(TrtNvfp4DecoderArgs const& args) {
        auto const all = static_cast<int>(args.tokens * (args.heads / args.kv_heads));
        count = static_cast<int>(args.kv_heads) * ceil_div(all, kRows);
        rows = std::min(all, kRows);
    }
};

template <typename T>
size_t lay_out(DecoderArgs<T>& args, TrtNvfp4DecoderArgs const& call, void* base) {
    Workspace workspace(base);
    int64_t const m = args.m;
    args.input = workspace.take<uint32_t>(m * call.hidden);
    args.qkv = workspace.take<uint32_t>(m * qkv_rows(call));
    args.attended = workspace.take<uint32_t>(m * call.heads * call.head_dim);
    args.middle = workspace.take<uint32_t>(m * call.hidden);
    args.hidden = workspace.take<uint32_t>(m * hidden_values(call));
    args.experts.logits = workspace.take<w4a16::Partial>(m * call.experts);
    int64_t const places = int64_t{1} * Pairs(call).count * args.slots * args.item_rows;
    args.sums = workspace.take<w4a16::Partial>(places * call.head_dim);
    args.softmaxes = workspace.take<w4a16::Partial>(places * 2);
    w4a16::take_partials(args, workspace);
    return workspace.size();
}

// How shared memory is divided: the rings, and what activations and attention take in turn.
template <typename T>
bool divide(DecoderKernel<T> const& kernel, int fixed, w4a16::Device const& device, DecoderArgs<T>& args) {
    int const stage = w4a16::kWarps * w4a16::kStageBytes;
    int const room = device.shared_bytes - fixed;
    w4a16::Footprint const bytes{stage, kernel.chunk_bytes, fixed};
    int const most_chunks = w4a16::staged_tile_capacity(bytes, device);
    if (most_chunks == 0) return false;
    // Weights in flight come first, then keys and values.
    for (int stages = kFewestStages; stages >= 1; --stages) {
        for (int warps = w4a16::kWarps; warps >= kernel.attention_parts; warps /= 2) {
            int const attention = kernel.attention_bytes(args.attention.tokens, warps);
            int const shared = std::max(attention, kernel.chunk_bytes);
            if (shared + stages * stage > room) continue;
            args.attention_warps = warps;
            int const chunks = std::max(attention / kernel.chunk_bytes, most_chunks);
            args.shared.staged_tile_chunks = std::min(chunks, (room - stages * stage) / kernel.chunk_bytes);
            return true;
        }
    }
    return false;
}

template <typename T>
void set_experts(DecoderArgs<T>& args, TrtNvfp4DecoderArgs const& call) {
    Experts<T>& experts = args.experts;
    experts.count = static_cast<int>(call.experts);
    experts.chosen = call.top_k;
    experts.intermediate = static_cast<int>(call.intermediate);
    experts.scoring = call.scoring;
    experts.renormalize = call.renormalize != 0;
    experts.scaling_factor = call.scaling_factor;
    experts.router = static_cast<T const*>(call.router_weight);
    auto const per_expert = [](w4a16::Projection& p, int64_t rows, int64_t k) {
        p.codes_per_layer = rows * k / 2;
        p.scales_per_layer = scale_bytes(rows, k);
    };
    per_expert(args.program.projections[kUp], 2 * call.intermediate, call.hidden);
    per_expert(args.program.projections[kDown], call.hidden, call.intermediate);
}

bool serves_experts(TrtNvfp4DecoderArgs const& args) {
    bool const scored = args.scoring == TRT_NVFP4_SOFTMAX || args.scoring == TRT_NVFP4_SIGMOID ||
                        args.scoring == TRT_NVFP4_SOFTMAX_OF_CHOSEN;
    return scored && args.head_dim <= kLargestHeadOfExperts && args.intermediate % w4a16::kChunk == 0 &&
           args.hidden <= kMostScored && args.experts <= kMostExperts && args.top_k <= kMostChosen;
}

template <typename T, bool kFp8>
TrtNvfp4Status launch_as(TrtNvfp4DecoderArgs const& call, void* workspace, cudaStream_t stream) {
    w4a16::Device device{};
    TRT_NVFP4_RETURN_IF_ERROR(w4a16::read_device(stream, device));
    device.sm_count = std::min(device.sm_count, kMostBlocks);
    DecoderArgs<T> args{};
    args.m = static_cast<int>(tokens_of(call));
    args.attention = attention::kernel_args<T>(attention::of_layer(call, 0));
    DecoderKernel<T> const kernel = find_kernel<T, kFp8>(args.m, args.attention.head_dim, call.experts > 0);
    cudaFuncAttributes attributes{};
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes"));
    auto const fixed = static_cast<int>(attributes.sharedSizeBytes);
    if (!device.cooperative || !divide(kernel, fixed, device, args)) {
        return record_error(TRT_NVFP4_UNSUPPORTED,
                            "NVFP4Decoder: the GPU cannot launch all blocks together, or gives a block too little "
                            "shared memory (" +
                                std::to_string(device.shared_bytes) + " bytes); use the generic tactic");
    }
    TrtNvfp4Weight const weights[kProjections] = {call.qkv, call.output, call.up, call.down};
    Sizes const sizes(call);
    int needed = 0;
    args.blocks = device.sm_count;
    for (int which = 0; which < kProjections; ++which) {
        w4a16::Projection& p = args.program.projections[which];
        p = w4a16::make_projection(weights[which], sizes.rows[which], sizes.k[which]);
        constexpr float kSplitCost = 2.0f;  // as of sm80_w4a16_mlp.cuh
        w4a16::Shape const shape{p.tiles(), p.chunks()};
        bool const in_turns = call.experts > 0 && which >= kUp;
        w4a16::set_split(p, w4a16::choose_split(shape, in_turns ? 1 : args.m, args.shared.staged_tile_chunks,
                                                kSplitCost, kernel.whole && !in_turns, device));
        needed = std::max(needed, ceil_div(p.chunks(), p.split.splits));
        args.blocks = std::min(args.blocks, p.tasks);
    }
    if (call.experts > 0) set_experts(args, call);
    int const stage = w4a16::kWarps * w4a16::kStageBytes;
    args.shared.staged_tile_chunks = ceil_div(needed, ceil_div(needed, args.shared.staged_tile_chunks));
    int const beside = std::max(kernel.attention_bytes(args.attention.tokens, args.attention_warps),
                                args.shared.staged_tile_chunks * kernel.chunk_bytes);
    args.shared.stages = std::min(w4a16::kMaxStages, (device.shared_bytes - fixed - beside) / stage);
    args.shared.bytes = args.shared.stages * stage + beside;

    args.surroundings[kQkv].norm_weight = static_cast<T const*>(call.attention_norm_weight);
    args.surroundings[kUp].norm_weight = static_cast<T const*>(call.mlp_norm_weight);
    args.surroundings[kUp].activation = call.activation;
    args.surroundings[kUp].gated = true;
    args.surroundings[kOutput].residual = args.surroundings[kDown].residual = true;
    args.layers = static_cast<int>(call.layers);
    args.turns = call.experts > 0 ? args.m : 1;
    int const phases = kUp + 2 * args.turns;
    args.by_phases = Divisor(phases);
    args.program.last_phase = args.layers * phases;
    args.by_tokens = Divisor(args.m);
    args.epsilon = call.epsilon;
    args.alpha = call.alpha;
    args.limit = call.limit;
    args.x = static_cast<T const*>(call.x);
    args.y = static_cast<T*>(call.y);
    args.in_flight = choose_in_flight(w4a16::kProducers * w4a16::kStageBytes, device.sm_count, device.bandwidth);
    args.one = 1;
    int64_t const elements = call.batch * call.kv_heads * call.capacity * call.head_dim;
    args.cache_bytes = elements * (kFp8 ? 1 : 2);
    Pairs const pairs(call);
    args.slots = std::max(args.attention.batch, device.sm_count / pairs.count);
    args.item_rows = pairs.rows;
    args.by_group = Divisor(args.attention.group);
    args.by_heads = Divisor(args.attention.heads);
    args.by_sequence = Divisor(args.attention.tokens);
    args.by_eights = Divisor(args.attention.head_dim / 8);

    size_t const used = lay_out(args, call, workspace);
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaMemsetAsync(workspace, w4a16::kSentinelByte, used, stream), "cudaMemsetAsync"));
    TRT_NVFP4_RETURN_IF_ERROR(
        allow_shared_memory(kernel.function, static_cast<size_t>(device.shared_bytes - fixed), "sm80_decoder"));
    cudaLaunchAttribute attribute = cooperative_attribute();
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(device.sm_count);
    config.blockDim = w4a16::kBlockThreads;
    config.dynamicSmemBytes = static_cast<size_t>(args.shared.bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return check_cuda(cudaLaunchKernelEx(&config, kernel.function, args), "sm80_decoder");
}

}  // namespace

bool is_linked(TrtNvfp4DecoderArgs const& args) {
    bool const fp8 = args.fp8_cache != 0;
    switch (args.dtype) {
        case TRT_NVFP4_FLOAT16:
            return fp8 ? find_kernel<__half, true> != nullptr : find_kernel<__half, false> != nullptr;
        case TRT_NVFP4_BFLOAT16:
            return fp8 ? find_kernel<__nv_bfloat16, true> != nullptr : find_kernel<__nv_bfloat16, false> != nullptr;
        case TRT_NVFP4_FLOAT32:
            break;
    }
    return true;
}

bool serves(TrtNvfp4DecoderArgs const& args) {
    int64_t const m = tokens_of(args);
    if (args.dtype == TRT_NVFP4_FLOAT32 || m < 1 || m > kMostTokens || args.heads > kMostHeads) return false;
    if (args.head_dim % 16 != 0 || args.head_dim > kLargestHead) return false;
    if (args.experts > 0 && !serves_experts(args)) return false;
    Sizes const sizes(args);
    // Every tile has a row that the next projection waits for.
    auto const fits = [](int64_t size) { return size % w4a16::kTileRows == 0; };
    if (!std::all_of(std::begin(sizes.rows), std::end(sizes.rows), fits)) return false;
    if (!std::all_of(std::begin(sizes.k), std::end(sizes.k), fits)) return false;
    int device = 0, cooperative = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device) != cudaSuccess) {
        cudaGetLastError();
        return true;
    }
    return cooperative != 0;
}

size_t workspace_bytes(TrtNvfp4DecoderArgs const& given) {
    TrtNvfp4DecoderArgs args = given;
    // No more tokens than the kernel takes.
    args.batch = std::min<int64_t>(args.batch, kMostTokens);
    args.tokens = std::min<int64_t>(args.tokens, kMostTokens);
    int64_t const m = std::min<int64_t>(tokens_of(args), kMostTokens);
    if (m < 1) return 0;
    Sizes const sizes(args);
    Workspace workspace;
    for (int64_t const width :
         {args.hidden, qkv_rows(args), args.heads * args.head_dim, args.hidden, hidden_values(args)}) {
        workspace.take<uint32_t>(m * width);
    }
    workspace.take<w4a16::Partial>(m * args.experts);
    // Slots of all pairs are as many as blocks, or each pair has one for every sequence.
    int64_t const group = args.heads / args.kv_heads;
    int64_t const rows = std::min<int64_t>(args.tokens * group, kRows);
    int64_t const of_sequences = args.kv_heads * (m * group + args.batch * (kRows - 1));
    int64_t const places = std::max(kMostBlocks * rows, of_sequences);
    workspace.take<w4a16::Partial>(places * args.head_dim);
    workspace.take<w4a16::Partial>(places * 2);
    for (int which = 0; which < kProjections; ++which) {
        workspace.take<w4a16::Partial>(w4a16::most_partials(sizes.rows[which], sizes.k[which], m));
    }
    return workspace.size();
}

TrtNvfp4Status launch(TrtNvfp4DecoderArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    if (args.dtype == TRT_NVFP4_FLOAT16) {
        return args.fp8_cache ? launch_as<__half, true>(args, workspace, stream)
                              : launch_as<__half, false>(args, workspace, stream);
    }
    return args.fp8_cache ? launch_as<__nv_bfloat16, true>(args, workspace, stream)
                          : launch_as<__nv_bfloat16, false>(args, workspace, stream);
}

}  // namespace trt_nvfp4::decoder
