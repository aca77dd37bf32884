#include <algorithm>

#include "api/attention/attention_args.h"
#include "api/validate.h"
#include "attention/generic_attention.cuh"
#include "attention/launch.h"
#include "attention/partials.cuh"
#include "attention/prepare.cuh"
#include "device/sm_count.h"

namespace trt_nvfp4 {
namespace {

using attention::Args;
using attention::kRows;
using attention::Partials;

constexpr int64_t kMostDecodeTokens = 16;   // of a sequence
constexpr int64_t kMostDecodeBlocks = 640;  // of every GPU, for workspaces that are sized before it is known

bool takes_decode(TrtNvfp4AttentionArgs const& args) {
    return args.tactic == TRT_NVFP4_TACTIC_AUTO ? args.tokens <= kMostDecodeTokens
                                                : args.tactic == TRT_NVFP4_TACTIC_ATTENTION_DECODE;
}

bool serves_tensor_cores(TrtNvfp4AttentionArgs const& args) {
    return args.dtype != TRT_NVFP4_FLOAT32 && args.head_dim % 16 == 0;
}

int64_t rows_of(TrtNvfp4AttentionArgs const& args, int64_t tokens) { return tokens * (args.heads / args.kv_heads); }

// KV heads, each as often as its rows fill blocks.
int64_t row_blocks(TrtNvfp4AttentionArgs const& args, int64_t tokens) {
    return args.kv_heads * ((rows_of(args, tokens) + kRows - 1) / kRows);
}

int64_t decode_slots(TrtNvfp4AttentionArgs const& args, int64_t tokens, int64_t blocks) {
    return std::max(args.batch, blocks / row_blocks(args, tokens));
}

struct AttentionWorkspace {
    void* queries = nullptr;
    Partials partials{};
    size_t size = 0;

    // `blocks`: of decode, that find room at once.
    AttentionWorkspace(TrtNvfp4AttentionArgs const& args, int64_t blocks, void* base) {
        if (args.tactic == TRT_NVFP4_TACTIC_GENERIC || !serves_tensor_cores(args)) return;
        Workspace workspace(base);
        queries = workspace.take<uint16_t>(args.batch * args.tokens * args.heads * args.head_dim);
        // A workspace for many tokens serves few.
        int64_t const tokens = std::min(args.tokens, kMostDecodeTokens);
        if (tokens > 0 && args.tactic != TRT_NVFP4_TACTIC_ATTENTION_PREFILL) {
            partials.slots = static_cast<int>(decode_slots(args, tokens, blocks));
            // At least the slots of all row blocks; never fewer for more tokens.
            int64_t const places = (row_blocks(args, tokens) * args.batch + blocks) * kRows;
            partials.values = workspace.take<float>(places * args.head_dim);
            partials.softmaxes = workspace.take<float2>(places);
        }
        size = workspace.size();
    }
};

TrtNvfp4Status decode_blocks(TrtNvfp4AttentionArgs const& args, cudaStream_t stream, int64_t& blocks) {
    int sms = 0, device = 0, shared_bytes = 0;
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, sms));
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                   "cudaDeviceGetAttribute"));
    int const of_sm = attention::decode_blocks_per_sm(static_cast<int>(args.head_dim), args.fp8_cache, shared_bytes);
    blocks = std::min<int64_t>(int64_t{sms} * of_sm, kMostDecodeBlocks);
    return TRT_NVFP4_SUCCESS;
}

template <typename T, bool kFp8>
TrtNvfp4Status run(TrtNvfp4AttentionArgs const& args, void* memory, cudaStream_t stream) {
    Args<T> const call = attention::kernel_args<T>(args);
    if constexpr (!std::is_same_v<T, float>) {
        if (args.tactic != TRT_NVFP4_TACTIC_GENERIC && serves_tensor_cores(args)) {
            int64_t blocks = 0;
            TRT_NVFP4_RETURN_IF_ERROR(decode_blocks(args, stream, blocks));
            AttentionWorkspace const workspace(args, blocks, memory);
            auto* const queries = static_cast<attention::Operand<T, kFp8>*>(workspace.queries);
            if (takes_decode(args)) {
                bool const prepared = call.rows() > kRows;
                if (prepared) TRT_NVFP4_RETURN_IF_ERROR((attention::launch_prepare<T, kFp8>(call, queries, stream)));
                return attention::launch_decode<T, kFp8>(call, prepared ? queries : nullptr, workspace.partials,
                                                         stream);
            }
            TRT_NVFP4_RETURN_IF_ERROR((attention::launch_prepare<T, kFp8>(call, queries, stream)));
#ifdef TRT_NVFP4_SM90
            if (!kFp8 && attention::serves_wide_prefill(call.head_dim)) {
                return attention::launch_wide_prefill<T>(call, queries, stream);
            }
#endif
            return attention::launch_prefill<T, kFp8>(call, queries, stream);
        }
    }
    TRT_NVFP4_RETURN_IF_ERROR((attention::launch_prepare<T, kFp8>(call, nullptr, stream)));
    return attention::launch_generic_attention<T, kFp8>(call, stream);
}

TrtNvfp4Status copy_cache(TrtNvfp4AttentionArgs const& args, void const* past, void* present, cudaStream_t stream) {
    if (past == present) return TRT_NVFP4_SUCCESS;
    int64_t const elements = args.batch * args.kv_heads * args.capacity * args.head_dim;
    auto const bytes = static_cast<size_t>(elements * (args.fp8_cache ? 1 : element_size(args.dtype)));
    return check_cuda(cudaMemcpyAsync(present, past, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

TrtNvfp4Status validate(TrtNvfp4AttentionArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "CachedAttention: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_linked("CachedAttention",
                                             !serves_tensor_cores(*args) || attention::decode_blocks_per_sm != nullptr,
                                             "tensor_core_attention"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("CachedAttention", args->batch));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("CachedAttention", args->tokens));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CachedAttention: heads", args->heads));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CachedAttention: kv_heads", args->kv_heads));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CachedAttention: the caches' capacity", args->capacity));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("CachedAttention: the head size", args->head_dim));
    TRT_NVFP4_RETURN_IF_ERROR(
        require(args->heads % args->kv_heads == 0, "CachedAttention: kv_heads must divide heads"));
    TRT_NVFP4_RETURN_IF_ERROR(
        require(args->head_dim <= TRT_NVFP4_MAX_HEAD_DIM, "CachedAttention: the head size must be at most 256"));
    TRT_NVFP4_RETURN_IF_ERROR(require(args->rope >= TRT_NVFP4_ROPE_NONE && args->rope <= TRT_NVFP4_ROPE_INTERLEAVED,
                                      "CachedAttention: rope must be 0, 1 or 2"));
    TRT_NVFP4_RETURN_IF_ERROR(
        require(args->rope == TRT_NVFP4_ROPE_NONE ||
                    (args->rotary_dim > 0 && args->rotary_dim <= args->head_dim && args->rotary_dim % 2 == 0),
                "CachedAttention: the rotated dimensions must be even, at least 2 and at most the head size"));
    TRT_NVFP4_RETURN_IF_ERROR(require(args->window >= 0, "CachedAttention: window must not be negative"));
    // Grid dimensions and 32-bit positions.
    TRT_NVFP4_RETURN_IF_ERROR(require(args->capacity < (int64_t{1} << 30) && args->tokens < (int64_t{1} << 30),
                                      "CachedAttention: capacity and new tokens must be below 2^30"));
    return require(args->batch <= 65535 && row_blocks(*args, kMostDecodeTokens) <= 65535 &&
                       args->tokens * (args->heads + 2 * args->kv_heads) < (int64_t{1} << 31),
                   "CachedAttention: at most 65535 sequences and KV heads, and 2^31 heads of new tokens of a sequence");
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4AttentionWorkspace(TrtNvfp4AttentionArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::AttentionWorkspace(*args, trt_nvfp4::kMostDecodeBlocks, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4AttentionTactics(TrtNvfp4AttentionArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = {};
    auto const add = [&](TrtNvfp4Tactic tactic) { tactics->list[tactics->count++] = tactic; };
    if (trt_nvfp4::serves_tensor_cores(*args)) {
        bool const few = args->tokens <= trt_nvfp4::kMostDecodeTokens;
        if (few) add(TRT_NVFP4_TACTIC_ATTENTION_DECODE);
        add(TRT_NVFP4_TACTIC_ATTENTION_PREFILL);
    }
    add(TRT_NVFP4_TACTIC_GENERIC);
    tactics->sensible = 1;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Attention(TrtNvfp4AttentionArgs const* args, void* workspace, size_t bytes,
                                 TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    size_t needed = 0;
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4AttentionWorkspace(args, &needed));
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("CachedAttention", needed, bytes));
    TrtNvfp4Tactics tactics{};
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4AttentionTactics(args, &tactics));
    TrtNvfp4Tactic* const end = tactics.list + tactics.count;
    if (args->tactic != TRT_NVFP4_TACTIC_AUTO && std::find(tactics.list, end, args->tactic) == end) {
        return unsupported_tactic("CachedAttention", args->tactic);
    }
    if (args->batch == 0) return TRT_NVFP4_SUCCESS;
    TRT_NVFP4_RETURN_IF_ERROR(copy_cache(*args, args->past_key, args->present_key, stream));
    TRT_NVFP4_RETURN_IF_ERROR(copy_cache(*args, args->past_value, args->present_value, stream));
    if (args->tokens == 0) return TRT_NVFP4_SUCCESS;
    return dispatch_dtype(args->dtype, [&](auto element) {
        using T = decltype(element);
        return args->fp8_cache ? run<T, true>(*args, workspace, stream) : run<T, false>(*args, workspace, stream);
    });
}
