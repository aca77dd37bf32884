#include <algorithm>
#include <cmath>

#include "api/validate.h"
#include "recurrent/convert_state.cuh"
#include "recurrent/generic_linear_attention.cuh"
#include "recurrent/launch.h"

namespace trt_nvfp4 {
namespace {

using recurrent::Args;
using recurrent::ChunkWorkspace;
using recurrent::kChunk;

// From so many tokens of a sequence on chunks are faster (measured on an H200).
constexpr int64_t kLeastChunkedTokens = 24;
// Chunks of all heads that one pair of launches covers, so that the workspace is bounded: 64 MiB.
constexpr int64_t kMostChunks = 4096;

bool serves_recurrent(TrtNvfp4LinearAttentionArgs const& args) {
    auto const fits = [](int64_t dim) { return dim % 16 == 0 && dim <= recurrent::kMaxDim; };
    return fits(args.key_dim) && fits(args.value_dim) && args.heads / args.kv_heads <= recurrent::kMaxGroup;
}

bool is_gated(TrtNvfp4LinearAttentionArgs const& args) { return (args.rule & TRT_NVFP4_RULE_GATED) != 0; }
bool is_delta(TrtNvfp4LinearAttentionArgs const& args) { return (args.rule & TRT_NVFP4_RULE_DELTA) != 0; }

// Whatever the GPU: see fits_chunked.
bool serves_chunked(TrtNvfp4LinearAttentionArgs const& args) {
    return serves_recurrent(args) && args.tokens > 0 && args.dtype != TRT_NVFP4_FLOAT32 &&
           args.heads == args.kv_heads && (!is_gated(args) || args.decay_dim == 1) &&
           (!is_delta(args) || args.key_dim <= recurrent::kMaxChunkedDeltaKeys);
}

// Whether the current GPU's blocks have the shared memory; true without a GPU.
bool fits_chunked(TrtNvfp4LinearAttentionArgs const& args) {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
        cudaGetLastError();
        return true;
    }
    return recurrent::chunked_shared_bytes(args.key_dim, is_delta(args)) <= bytes;
}

struct StateWorkspace {
    float* state = nullptr;  // in place of states of 16 bits
    ChunkWorkspace chunks{};
    size_t size = 0;

    StateWorkspace(TrtNvfp4LinearAttentionArgs const& args, void* base) {
        Workspace workspace(base);
        int64_t const heads = args.batch * args.kv_heads;
        if (args.state_dtype != TRT_NVFP4_FLOAT32) state = workspace.take<float>(heads * args.key_dim * args.value_dim);
        bool const chunked = args.tactic == TRT_NVFP4_TACTIC_AUTO ? args.tokens >= kLeastChunkedTokens
                                                                  : args.tactic == TRT_NVFP4_TACTIC_CHUNKED;
        if (chunked && serves_chunked(args) && heads > 0) {
            int64_t const all = heads * ((args.tokens + kChunk - 1) / kChunk);
            int64_t const count = std::min(all, std::max(kMostChunks, heads));
            chunks.corrections = workspace.take<uint16_t>(count * kChunk * kChunk);
            chunks.scores = workspace.take<uint16_t>(count * kChunk * kChunk);
            chunks.decays = workspace.take<float>(count * kChunk);
            chunks.chunks = count / heads;
        }
        size = workspace.size();
    }
};

template <typename T>
Args<T> kernel_args(TrtNvfp4LinearAttentionArgs const& args) {
    Args<T> result{};
    result.batch = static_cast<int>(args.batch);
    result.tokens = static_cast<int>(args.tokens);
    result.heads = static_cast<int>(args.heads);
    result.kv_heads = static_cast<int>(args.kv_heads);
    result.key_dim = static_cast<int>(args.key_dim);
    result.value_dim = static_cast<int>(args.value_dim);
    result.group = static_cast<int>(args.heads / args.kv_heads);
    result.decay_dim = is_gated(args) ? static_cast<int>(args.decay_dim) : 0;
    result.beta_heads = is_delta(args) ? static_cast<int>(args.beta_heads) : 0;
    result.scale = args.scale != 0.0f ? args.scale : 1.0f / std::sqrt(static_cast<float>(args.key_dim));
    result.query = static_cast<T const*>(args.query);
    result.key = static_cast<T const*>(args.key);
    result.value = static_cast<T const*>(args.value);
    result.decay = static_cast<T const*>(args.decay);
    result.beta = static_cast<T const*>(args.beta);
    result.past = static_cast<float const*>(args.past_state);
    result.y = static_cast<T*>(args.y);
    result.present = static_cast<float*>(args.present_state);
    return result;
}

template <typename T>
TrtNvfp4Status launch(TrtNvfp4Tactic tactic, Args<T> const& args, ChunkWorkspace const& chunks, cudaStream_t stream) {
    if constexpr (!std::is_same_v<T, float>) {
        if (tactic == TRT_NVFP4_TACTIC_CHUNKED) return recurrent::launch_chunked(args, chunks, stream);
    }
    return tactic == TRT_NVFP4_TACTIC_RECURRENT ? recurrent::launch_recurrent(args, stream)
                                                : recurrent::launch_generic(args, stream);
}

template <typename T>
TrtNvfp4Status run(TrtNvfp4LinearAttentionArgs const& args, TrtNvfp4Tactic tactic, void* memory, cudaStream_t stream) {
    Args<T> call = kernel_args<T>(args);
    StateWorkspace const workspace(args, memory);
    if (args.state_dtype == TRT_NVFP4_FLOAT32) return launch(tactic, call, workspace.chunks, stream);
    int64_t const elements = args.batch * args.kv_heads * args.key_dim * args.value_dim;
    call.past = args.past_state == nullptr ? nullptr : workspace.state;
    call.present = workspace.state;
    return dispatch_dtype(args.state_dtype, [&](auto element) {
        using S = decltype(element);
        if (call.past != nullptr) {
            TRT_NVFP4_RETURN_IF_ERROR(
                recurrent::launch_convert(static_cast<S const*>(args.past_state), workspace.state, elements, stream));
        }
        TRT_NVFP4_RETURN_IF_ERROR(launch(tactic, call, workspace.chunks, stream));
        return recurrent::launch_convert(static_cast<float const*>(workspace.state),
                                         static_cast<S*>(args.present_state), elements, stream);
    });
}

TrtNvfp4Status validate(TrtNvfp4LinearAttentionArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "LinearAttention: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("LinearAttention", args->batch));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("LinearAttention", args->tokens));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("LinearAttention: q_num_heads", args->heads));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("LinearAttention: kv_num_heads", args->kv_heads));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("LinearAttention: d_k", args->key_dim));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("LinearAttention: d_v", args->value_dim));
    TRT_NVFP4_RETURN_IF_ERROR(
        require(args->heads % args->kv_heads == 0, "LinearAttention: kv_num_heads must divide q_num_heads"));
    TRT_NVFP4_RETURN_IF_ERROR(require(!is_gated(*args) || args->decay_dim == 1 || args->decay_dim == args->key_dim,
                                      "LinearAttention: update rules gated and gated_delta need a decay of each head, "
                                      "or of each of its d_k rows"));
    TRT_NVFP4_RETURN_IF_ERROR(
        require(!is_delta(*args) || args->beta_heads == 1 || args->beta_heads == args->kv_heads,
                "LinearAttention: update rules delta and gated_delta need a beta of each head, or "
                "of each token"));
    // Grid dimensions and 32-bit sizes.
    return require(args->batch <= 65535 && args->kv_heads <= 65535 && args->heads <= (1 << 20) &&
                       args->key_dim <= 65536 && args->value_dim <= 65536 && args->tokens < (int64_t{1} << 30),
                   "LinearAttention: at most 65535 sequences and KV heads, and heads of 65536");
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4LinearAttentionWorkspace(TrtNvfp4LinearAttentionArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::StateWorkspace(*args, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4LinearAttentionTactics(TrtNvfp4LinearAttentionArgs const* args, TrtNvfp4Tactics* tactics) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    *tactics = {};
    auto const add = [&](TrtNvfp4Tactic tactic) { tactics->list[tactics->count++] = tactic; };
    bool const chunked = serves_chunked(*args) && fits_chunked(*args), many = args->tokens >= kLeastChunkedTokens;
    if (chunked && many) add(TRT_NVFP4_TACTIC_CHUNKED);
    if (serves_recurrent(*args)) add(TRT_NVFP4_TACTIC_RECURRENT);
    if (chunked && !many) add(TRT_NVFP4_TACTIC_CHUNKED);
    add(TRT_NVFP4_TACTIC_GENERIC);
    tactics->sensible = 1;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4LinearAttention(TrtNvfp4LinearAttentionArgs const* args, void* workspace, size_t bytes,
                                       TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    size_t needed = 0;
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4LinearAttentionWorkspace(args, &needed));
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("LinearAttention", needed, bytes));
    TrtNvfp4Tactics tactics{};
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4LinearAttentionTactics(args, &tactics));
    TrtNvfp4Tactic const tactic = args->tactic == TRT_NVFP4_TACTIC_AUTO ? tactics.list[0] : args->tactic;
    TrtNvfp4Tactic* const end = tactics.list + tactics.count;
    if (std::find(tactics.list, end, tactic) == end) return unsupported_tactic("LinearAttention", tactic);
    if (args->batch == 0) return TRT_NVFP4_SUCCESS;
    return dispatch_dtype(args->dtype,
                          [&](auto element) { return run<decltype(element)>(*args, tactic, workspace, stream); });
}
