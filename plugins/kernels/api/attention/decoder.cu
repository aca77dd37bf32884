#include <algorithm>

#include "api/attention/attention_args.h"
#include "api/attention/decoder_layers.h"
#include "api/validate.h"
#include "formats/nvfp4_matrix.cuh"
#include "generic/generic_rmsnorm.cuh"
#include "generic/generic_router.cuh"

// A library has the MLPs or the mixtures that its decoders need.
extern "C" {
TRT_NVFP4_OPTIONAL decltype(trtNvfp4MlpWorkspace) trtNvfp4MlpWorkspace;
TRT_NVFP4_OPTIONAL decltype(trtNvfp4Mlp) trtNvfp4Mlp;
TRT_NVFP4_OPTIONAL decltype(trtNvfp4MoeWorkspace) trtNvfp4MoeWorkspace;
TRT_NVFP4_OPTIONAL decltype(trtNvfp4Moe) trtNvfp4Moe;
}

namespace trt_nvfp4 {
namespace {

// One token takes three quarters of the parts' time in the launch for all layers; 8 tokens are mostly slower there,
// mixtures twice (benchmarks/notes).
bool prefers_layers(TrtNvfp4DecoderArgs const& args) { return args.batch * args.tokens == 1 && decoder::serves(args); }

bool takes_layers(TrtNvfp4DecoderArgs const& args) {
    return args.tactic == TRT_NVFP4_TACTIC_AUTO ? prefers_layers(args)
                                                : args.tactic == TRT_NVFP4_TACTIC_DECODER && decoder::serves(args);
}

// The weight of a layer.
TrtNvfp4Weight weight_of(TrtNvfp4DecoderArgs const& args, TrtNvfp4Weight const& all, int64_t rows, int64_t k,
                         int64_t layer) {
    Nvfp4Rows const own = weight_rows(all, rows, k, layer);
    auto const* const bias = static_cast<uint8_t const*>(all.bias) + layer * rows * element_size(args.dtype);
    return {own.packed, own.block_scales, own.tensor_scale, bias};
}

// A layer of many tokens: the parts as launches of their own, over the same weights.
class Parts {
 public:
    Parts(TrtNvfp4DecoderArgs const& args, void* base) : args_(args), m_(args.batch * args.tokens) {
        Workspace workspace(base);
        int64_t const element = element_size(args.dtype);
        qkv_rows_ = (args.heads + 2 * args.kv_heads) * args.head_dim;
        attended_ = args.heads * args.head_dim;
        normalized_ = workspace.take<uint8_t>(m_ * args.hidden * element);
        qkv_ = workspace.take<uint8_t>(m_ * qkv_rows_ * element);
        heads_ = workspace.take<uint8_t>(m_ * attended_ * element);
        middle_ = workspace.take<uint8_t>(m_ * args.hidden * element);
        logits_ = workspace.take<float>(m_ * args.experts);
        no_correction_ = workspace.take<float>(args.experts);
        base_ = base == nullptr ? nullptr : static_cast<uint8_t*>(base) + workspace.size();
        size_ = workspace.size();
    }

    TrtNvfp4Status measure(size_t& bytes) {
        size_t attention = 0, qkv = 0, output = 0, mlp = 0;
        TrtNvfp4AttentionArgs const attention_args = attention_of(0);
        TrtNvfp4LinearArgs const qkv_args = qkv_of(0), output_args = output_of(0);
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4AttentionWorkspace(&attention_args, &attention));
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4LinearWorkspace(&qkv_args, &qkv));
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4LinearWorkspace(&output_args, &output));
        if (args_.experts > 0) {
            TrtNvfp4MoeArgs const moe_args = moe_of(0);
            TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4MoeWorkspace(&moe_args, &mlp));
        } else {
            TrtNvfp4MlpArgs const mlp_args = mlp_of(0);
            TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4MlpWorkspace(&mlp_args, &mlp));
        }
        rest_ = std::max({attention, qkv, output, mlp});
        bytes = size_ + rest_;
        return TRT_NVFP4_SUCCESS;
    }

    template <typename T>
    TrtNvfp4Status run(int64_t layer, cudaStream_t stream) {
        void const* const x = layer == 0 ? args_.x : args_.y;
        TRT_NVFP4_RETURN_IF_ERROR(normalize<T>(x, args_.attention_norm_weight, layer, stream));
        TrtNvfp4LinearArgs const qkv = qkv_of(layer), output = output_of(layer);
        TrtNvfp4AttentionArgs const attention = attention_of(layer);
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4Linear(&qkv, base_, rest_, stream));
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4Attention(&attention, base_, rest_, stream));
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4Linear(&output, base_, rest_, stream));
        TRT_NVFP4_RETURN_IF_ERROR(add<T>(normalized_, x, middle_, stream));
        if (args_.experts > 0) return run_experts<T>(layer, stream);
        TrtNvfp4MlpArgs const mlp = mlp_of(layer);
        return trtNvfp4Mlp(&mlp, base_, rest_, stream);
    }

 private:
    template <typename T>
    TrtNvfp4Status normalize(void const* x, void const* weights, int64_t layer, cudaStream_t stream) const {
        RmsNormArgs<T> norm{};
        norm.m = m_;
        norm.k = args_.hidden;
        norm.x = static_cast<T const*>(x);
        norm.weight = static_cast<T const*>(weights) + layer * args_.hidden;
        norm.epsilon = args_.epsilon;
        norm.n = static_cast<T*>(normalized_);
        return launch_rmsnorm(norm, stream);
    }

    template <typename T>
    TrtNvfp4Status add(void const* x, void const* residual, void* r, cudaStream_t stream) const {
        RmsNormArgs<T> sum{};
        sum.m = m_;
        sum.k = args_.hidden;
        sum.x = static_cast<T const*>(x);
        sum.residual = static_cast<T const*>(residual);
        sum.r = static_cast<T*>(r);
        return launch_rmsnorm(sum, stream);
    }

    template <typename T>
    TrtNvfp4Status run_experts(int64_t layer, cudaStream_t stream) {
        auto const* const router = static_cast<T const*>(args_.router_weight) + layer * args_.experts * args_.hidden;
        TrtNvfp4MoeArgs const moe = moe_of(layer);
        TRT_NVFP4_RETURN_IF_ERROR(normalize<T>(middle_, args_.mlp_norm_weight, layer, stream));
        TRT_NVFP4_RETURN_IF_ERROR(launch_router(static_cast<T const*>(normalized_), router, logits_, m_, args_.experts,
                                                args_.hidden, stream));
        auto const size = static_cast<size_t>(args_.experts) * sizeof(float);
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaMemsetAsync(no_correction_, 0, size, stream), "cudaMemsetAsync"));
        TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4Moe(&moe, base_, rest_, stream));
        return add<T>(args_.y, middle_, args_.y, stream);
    }

    TrtNvfp4LinearArgs linear(TrtNvfp4Weight const& weight, int64_t n, int64_t k, int64_t layer) const {
        TrtNvfp4LinearArgs result{};
        result.dtype = args_.dtype;
        result.m = m_;
        result.n = n;
        result.k = k;
        result.weight = weight_of(args_, weight, n, k, layer);
        return result;
    }

    TrtNvfp4LinearArgs qkv_of(int64_t layer) const {
        TrtNvfp4LinearArgs result = linear(args_.qkv, qkv_rows_, args_.hidden, layer);
        result.x = normalized_;
        result.y = qkv_;
        return result;
    }

    TrtNvfp4LinearArgs output_of(int64_t layer) const {
        TrtNvfp4LinearArgs result = linear(args_.output, args_.hidden, attended_, layer);
        result.x = heads_;
        result.y = normalized_;
        return result;
    }

    TrtNvfp4AttentionArgs attention_of(int64_t layer) const {
        TrtNvfp4AttentionArgs result = attention::of_layer(args_, layer);
        result.qkv = qkv_;
        result.y = heads_;
        return result;
    }

    TrtNvfp4MoeArgs moe_of(int64_t layer) const {
        TrtNvfp4MoeArgs result{};
        result.dtype = args_.dtype;
        result.activation = args_.activation;
        result.scoring = args_.scoring;
        result.gated = 1;
        result.renormalize = args_.renormalize;
        result.top_k = args_.top_k;
        result.groups = result.open_groups = result.group_score_top = 1;
        result.scaling_factor = args_.scaling_factor;
        result.alpha = args_.alpha;
        result.limit = args_.limit;
        result.m = m_;
        result.experts = args_.experts;
        result.hidden = args_.hidden;
        result.intermediate = args_.intermediate;
        result.x = normalized_;
        result.router_logits = logits_;
        result.correction_bias = no_correction_;
        // Arrays over layers are arrays over layers times experts.
        int64_t const first = layer * args_.experts;
        result.up = weight_of(args_, args_.up, 2 * args_.intermediate, args_.hidden, first);
        result.down = weight_of(args_, args_.down, args_.hidden, args_.intermediate, first);
        result.y = args_.y;
        return result;
    }

    TrtNvfp4MlpArgs mlp_of(int64_t layer) const {
        TrtNvfp4MlpArgs result{};
        result.dtype = args_.dtype;
        result.activation = args_.activation;
        result.gated = result.norm = result.residual = 1;
        result.epsilon = args_.epsilon;
        result.alpha = args_.alpha;
        result.limit = args_.limit;
        result.layers = 1;
        result.m = m_;
        result.hidden_in = result.hidden_out = args_.hidden;
        result.intermediate = args_.intermediate;
        result.x = middle_;
        result.norm_weight =
            static_cast<uint8_t const*>(args_.mlp_norm_weight) + layer * args_.hidden * element_size(args_.dtype);
        result.up = weight_of(args_, args_.up, 2 * args_.intermediate, args_.hidden, layer);
        result.down = weight_of(args_, args_.down, args_.hidden, args_.intermediate, layer);
        result.y = args_.y;
        return result;
    }

    TrtNvfp4DecoderArgs const& args_;
    int64_t m_, qkv_rows_, attended_;
    void *normalized_, *qkv_, *heads_, *middle_;
    float *logits_, *no_correction_;
    void* base_;
    size_t size_, rest_ = 0;
};

TrtNvfp4Status validate(TrtNvfp4DecoderArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "NVFP4Decoder: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4Decoder", decoder::is_linked(*args), "decoder of these types"));
    TRT_NVFP4_RETURN_IF_ERROR(require_linked(
        "NVFP4Decoder", args->experts > 0 ? trtNvfp4Moe != nullptr : trtNvfp4Mlp != nullptr, "mlp or moe"));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("NVFP4Decoder: layers", args->layers));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4Decoder: the hidden size", args->hidden));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4Decoder: the intermediate size", args->intermediate));
    TRT_NVFP4_RETURN_IF_ERROR(require_activation("NVFP4Decoder", args->activation, true));
    // 32-bit numbers of values, of rows and of phases.
    int64_t const most = int64_t{1} << 24;
    TRT_NVFP4_RETURN_IF_ERROR(require(args->layers <= 4096 && args->hidden <= most && args->intermediate <= most &&
                                          args->heads <= most && args->kv_heads <= most,
                                      "NVFP4Decoder: at most 4096 layers, and sizes of 2^24"));
    TRT_NVFP4_RETURN_IF_ERROR(require(args->experts >= 0, "NVFP4Decoder: the number of experts is negative"));
    TRT_NVFP4_RETURN_IF_ERROR(require(args->heads * args->head_dim % 16 == 0,
                                      "NVFP4Decoder: heads times their size must be a multiple of 16"));
    // The parts validate what is theirs.
    size_t bytes = 0;
    return Parts(*args, nullptr).measure(bytes);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4DecoderWorkspace(TrtNvfp4DecoderArgs const* args, size_t* bytes) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    TRT_NVFP4_RETURN_IF_ERROR(Parts(*args, nullptr).measure(*bytes));
    if (args->tactic != TRT_NVFP4_TACTIC_GENERIC && args->dtype != TRT_NVFP4_FLOAT32) {
        *bytes = std::max(*bytes, decoder::workspace_bytes(*args));
    }
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4DecoderTactics(TrtNvfp4DecoderArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = {};
    auto const add = [&](TrtNvfp4Tactic tactic) { tactics->list[tactics->count++] = tactic; };
    bool const first = trt_nvfp4::prefers_layers(*args);
    if (first) add(TRT_NVFP4_TACTIC_DECODER);
    add(TRT_NVFP4_TACTIC_GENERIC);
    if (!first && trt_nvfp4::decoder::serves(*args)) add(TRT_NVFP4_TACTIC_DECODER);
    tactics->sensible = tactics->count;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Decoder(TrtNvfp4DecoderArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    size_t needed = 0;
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4DecoderWorkspace(args, &needed));
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("NVFP4Decoder", needed, bytes));
    bool const one_launch = takes_layers(*args);
    if (!one_launch && args->tactic != TRT_NVFP4_TACTIC_AUTO && args->tactic != TRT_NVFP4_TACTIC_GENERIC) {
        return unsupported_tactic("NVFP4Decoder", args->tactic);
    }
    if (args->batch == 0) return TRT_NVFP4_SUCCESS;
    if (args->past != args->present) {
        int64_t const elements = args->layers * 2 * args->batch * args->kv_heads * args->capacity * args->head_dim;
        auto const size = static_cast<size_t>(elements * (args->fp8_cache != 0 ? 1 : element_size(args->dtype)));
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(
            cudaMemcpyAsync(args->present, args->past, size, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync"));
    }
    if (args->tokens == 0) return TRT_NVFP4_SUCCESS;
    if (one_launch) return decoder::launch(*args, workspace, stream);
    return dispatch_dtype(args->dtype, [&](auto element) {
        Parts parts(*args, workspace);
        size_t unused = 0;
        TRT_NVFP4_RETURN_IF_ERROR(parts.measure(unused));
        for (int64_t layer = 0; layer < args->layers; ++layer) {
            TRT_NVFP4_RETURN_IF_ERROR(parts.run<decltype(element)>(layer, stream));
        }
        return TRT_NVFP4_SUCCESS;
    });
}
