#include <algorithm>

#include "api/validate.h"
#include "formats/fused_quantize.cuh"
#include "generic/generic_gemm.cuh"
#include "heuristics/tactics.h"
#include "w4a4/w4a4_split.cuh"

namespace trt_nvfp4 {
namespace {

struct MlpWorkspace {
    void* normalized = nullptr;  // T [m, hidden_in], of the generic kernels and of rows too long for fused_quantize
    void* hidden = nullptr;      // [m, intermediate] in T (W4A16) or float32 (W4A4), of the generic kernels
    Nvfp4Matrix quantized_input{};
    Nvfp4Matrix quantized_hidden{};
    float* partials = nullptr;  // of the down GEMM
    size_t size;

    MlpWorkspace(TrtNvfp4MlpArgs const& args, void* base)
        : size(w4a16::serves(args) ? w4a16::workspace_bytes(args) : 0) {
        if (args.tactic != TRT_NVFP4_TACTIC_GENERIC && w4a16::serves(args)) return;
        Workspace workspace(base);
        int64_t const element = element_size(args.dtype);
        bool const generic = w4a4_may_be_generic(args);
        if (args.norm && (generic || !fused_quantize_fits(args.hidden_in, element))) {
            normalized = workspace.take<uint8_t>(args.m * args.hidden_in * element);
        }
        if (generic) {
            hidden = workspace.take<uint8_t>(args.m * args.intermediate * (args.quantize_activations ? 4 : element));
        }
        if (args.quantize_activations) {
            quantized_input = take_nvfp4_matrix(workspace, args.m, args.hidden_in, args);
            quantized_hidden = take_nvfp4_matrix(workspace, args.m, args.intermediate, args);
            if (w4a4_fits(args)) partials = workspace.take<float>(split_elements(args.m, args.hidden_out));
        }
        size = std::max(workspace.size(), size);
    }
};

template <typename T, typename Hidden>
GemmArgs<T, Hidden> up_gemm(TrtNvfp4MlpArgs const& args, int64_t layer, void* hidden) {
    GemmArgs<T, Hidden> gemm{};
    gemm.m = args.m;
    gemm.n = args.gated ? 2 * args.intermediate : args.intermediate;
    gemm.k = args.hidden_in + args.residual_channels;
    gemm.w = weight_rows(args.up, gemm.n, gemm.k, layer);
    gemm.bias = static_cast<T const*>(args.up.bias) + layer * gemm.n;
    gemm.activation = args.activation;
    gemm.gated = args.gated;
    gemm.alpha = args.alpha;
    gemm.limit = args.limit;
    gemm.out = static_cast<Hidden*>(hidden);
    return gemm;
}

template <typename T>
GemmArgs<T, T> down_gemm(TrtNvfp4MlpArgs const& args, int64_t layer, T const* residual) {
    GemmArgs<T, T> gemm{};
    gemm.m = args.m;
    gemm.n = args.hidden_out;
    gemm.k = args.intermediate + args.residual_channels;
    gemm.w = weight_rows(args.down, gemm.n, gemm.k, layer);
    gemm.bias = static_cast<T const*>(args.down.bias) + layer * gemm.n;
    gemm.residual = residual;
    gemm.out = static_cast<T*>(args.y);
    return gemm;
}

// Both GEMMs of a layer on tensor cores, from the quantized input; h leaves the first one in NVFP4. Where the hidden
// tensor scale may be 0 the first GEMM runs twice: once to find the amax, so that h is never stored in a wider type.
TrtNvfp4Status w4a4_gemms(TrtNvfp4MlpArgs const& args, TrtNvfp4Tactic tactic, int64_t layer,
                          MlpWorkspace const& workspace, void const* residual, cudaStream_t stream) {
    W4A4Kernels const kernels = w4a4_kernels(tactic);
    int64_t const element = element_size(args.dtype);
    W4A4Gemm up{};
    up.m = args.m;
    up.n = args.gated ? 2 * args.intermediate : args.intermediate;
    up.k = args.hidden_in + args.residual_channels;
    up.a = workspace.quantized_input.rows();
    up.w = weight_rows(args.up, up.n, up.k, layer);
    up.dtype = args.dtype;
    up.bias = static_cast<uint8_t const*>(args.up.bias) + layer * up.n * element;
    up.activation = args.activation;
    up.alpha = args.alpha;
    up.limit = args.limit;
    up.hidden = workspace.quantized_hidden;
    up.hidden_scale = args.hidden_tensor_scale + layer;
    W4A4Launch const launch_up = args.gated ? kernels.gated : kernels.plain;
    if (!args.static_scales) {
        up.amax_pass = true;
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(up.hidden.amax_bits, 0, sizeof(uint32_t), stream), "clear amax"));
        TRT_NVFP4_RETURN_IF_ERROR(launch_up(up, stream));
    }
    up.amax_pass = false;
    TRT_NVFP4_RETURN_IF_ERROR(launch_up(up, stream));

    W4A4Gemm down{};
    down.m = args.m;
    down.n = args.hidden_out;
    down.k = args.intermediate + args.residual_channels;
    down.a = workspace.quantized_hidden.rows();
    down.w = weight_rows(args.down, down.n, down.k, layer);
    down.dtype = args.dtype;
    down.bias = static_cast<uint8_t const*>(args.down.bias) + layer * down.n * element;
    down.residual = residual;
    down.out = args.y;
    return launch_w4a4_dense(kernels, down, workspace.partials, stream);
}

// y serves as x of every layer but the first: only the down GEMM writes it, and reads of it just the element it writes.
template <typename T>
TrtNvfp4Status run_layer(TrtNvfp4MlpArgs const& args, TrtNvfp4Tactic tactic, int64_t layer,
                         MlpWorkspace const& workspace, cudaStream_t stream) {
    T const* const x = static_cast<T const*>(layer == 0 ? args.x : args.y);
    T const* const norm_weight = args.norm ? static_cast<T const*>(args.norm_weight) + layer * args.hidden_in : nullptr;
    T const* const residual = args.residual ? x : nullptr;
    if (tactic != TRT_NVFP4_TACTIC_GENERIC) {
        FusedQuantizeArgs<T> quantization{};
        quantization.m = args.m;
        quantization.k = args.hidden_in;
        quantization.x = x;
        quantization.norm_weight = norm_weight;
        quantization.epsilon = args.epsilon;
        quantization.given_scale = args.input_tensor_scale + layer;
        quantization.out = workspace.quantized_input;
        TRT_NVFP4_RETURN_IF_ERROR(
            launch_norm_quantize(quantization, workspace.normalized, args.static_scales != 0, stream));
        return w4a4_gemms(args, tactic, layer, workspace, residual, stream);
    }
    T const* input = x;
    if (args.norm) {
        RmsNormArgs<T> norm{};
        norm.m = args.m;
        norm.k = args.hidden_in;
        norm.x = x;
        norm.weight = norm_weight;
        norm.epsilon = args.epsilon;
        norm.n = static_cast<T*>(workspace.normalized);
        TRT_NVFP4_RETURN_IF_ERROR(launch_rmsnorm(norm, stream));
        input = norm.n;
    }
    GemmArgs<T, T> const down = down_gemm<T>(args, layer, residual);
    if (!args.quantize_activations) {
        TRT_NVFP4_RETURN_IF_ERROR(
            launch_gemm(DenseRows<T>{input}, up_gemm<T, T>(args, layer, workspace.hidden), stream));
        return launch_gemm(DenseRows<T>{static_cast<T const*>(workspace.hidden)}, down, stream);
    }
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize(input, args.m, args.hidden_in, args.input_tensor_scale + layer,
                                              args.static_scales != 0, workspace.quantized_input, stream));
    TRT_NVFP4_RETURN_IF_ERROR(
        launch_gemm(workspace.quantized_input.rows(), up_gemm<T, float>(args, layer, workspace.hidden), stream));
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize(static_cast<float const*>(workspace.hidden), args.m, args.intermediate,
                                              args.hidden_tensor_scale + layer, args.static_scales != 0,
                                              workspace.quantized_hidden, stream));
    return launch_gemm(workspace.quantized_hidden.rows(), down, stream);
}

template <typename T>
TrtNvfp4Status run_layers(TrtNvfp4MlpArgs const& args, TrtNvfp4Tactic tactic, MlpWorkspace const& workspace,
                          cudaStream_t stream) {
    for (int64_t layer = 0; layer < args.layers; ++layer) {
        TRT_NVFP4_RETURN_IF_ERROR(run_layer<T>(args, tactic, layer, workspace, stream));
    }
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status validate(TrtNvfp4MlpArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "NVFP4 MLP: no arguments"));
    if (w4a16::is_arithmetic_of(*args)) {
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4 MLP", w4a16::is_linked(*args), "w4a16"));
    }
    if (w4a4_fits(*args)) {
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4 MLP", w4a4_is_linked(), "w4a4"));
        bool const has_gates = args->gated == 0 || w4a4_gated_is_linked();
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4 MLP", has_gates, "w4a4_gated"));
    }
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("NVFP4 MLP", args->m));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("NVFP4 MLP: the number of layers", args->layers));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4 MLP: the input size", args->hidden_in));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4 MLP: the intermediate size", args->intermediate));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("NVFP4 MLP: the output size", args->hidden_out));
    if ((args->layers > 1 || args->residual) && args->hidden_in != args->hidden_out) {
        return record_error(TRT_NVFP4_INVALID_ARGUMENT,
                            "NVFP4 MLP: several layers or a residual need as many outputs as inputs, there are " +
                                std::to_string(args->hidden_out) + " and " + std::to_string(args->hidden_in));
    }
    TRT_NVFP4_RETURN_IF_ERROR(require_scale_search("NVFP4 MLP", args->scale_search));
    TRT_NVFP4_RETURN_IF_ERROR(require_residual("NVFP4 MLP", args->residual_channels, args->quantize_activations != 0,
                                               std::min(args->hidden_in, args->intermediate)));
    return require_activation("NVFP4 MLP", args->activation, args->gated != 0);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4MlpWorkspace(TrtNvfp4MlpArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::MlpWorkspace(*args, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4MlpTactics(TrtNvfp4MlpArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = trt_nvfp4::tactics_of(*args);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Mlp(TrtNvfp4MlpArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    MlpWorkspace const pieces(*args, workspace);
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("NVFP4 MLP", pieces.size, bytes));
    TrtNvfp4Tactic const tactic = resolve_tactic(*args);
    if (tactic == TRT_NVFP4_TACTIC_AUTO) return unsupported_tactic("NVFP4 MLP", args->tactic);
    if (args->m == 0) return TRT_NVFP4_SUCCESS;
    if (is_w4a16(tactic)) return w4a16::launch(*args, workspace, stream);
    return dispatch_dtype(args->dtype,
                          [&](auto element) { return run_layers<decltype(element)>(*args, tactic, pieces, stream); });
}
