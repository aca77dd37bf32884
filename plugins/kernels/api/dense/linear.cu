#include <algorithm>

#include "api/validate.h"
#include "formats/fused_quantize.cuh"
#include "generic/generic_gemm.cuh"
#include "heuristics/tactics.h"
#include "w4a4/w4a4_split.cuh"

namespace trt_nvfp4 {
namespace {

struct LinearWorkspace {
    Nvfp4Matrix quantized{};
    float* partials = nullptr;
    size_t size;

    LinearWorkspace(TrtNvfp4LinearArgs const& args, void* base)
        : size(w4a16::serves(args) ? w4a16::workspace_bytes(args) : 0) {
        if (args.tactic != TRT_NVFP4_TACTIC_GENERIC && w4a16::serves(args)) return;
        Workspace workspace(base);
        if (args.quantize_activations) quantized = take_nvfp4_matrix(workspace, args.m, args.k, args);
        if (w4a4_fits(args)) partials = workspace.take<float>(split_elements(args.m, args.n));
        size = std::max(workspace.size(), size);
    }
};

template <typename T>
TrtNvfp4Status generic_linear(TrtNvfp4LinearArgs const& args, LinearWorkspace const& workspace, cudaStream_t stream) {
    T const* const x = static_cast<T const*>(args.x);
    GemmArgs<T, T> gemm{};
    gemm.m = args.m;
    gemm.n = args.n;
    gemm.k = args.k + args.residual_channels;
    gemm.w = weight_rows(args.weight, args.n, gemm.k, 0);
    gemm.bias = static_cast<T const*>(args.weight.bias);
    gemm.activation = args.activation;
    gemm.out = static_cast<T*>(args.y);
    if (!args.quantize_activations) return launch_gemm(DenseRows<T>{x}, gemm, stream);
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize(x, args.m, args.k, args.input_tensor_scale, args.static_scales != 0,
                                              workspace.quantized, stream));
    return launch_gemm(workspace.quantized.rows(), gemm, stream);
}

TrtNvfp4Status w4a4_linear(TrtNvfp4LinearArgs const& args, TrtNvfp4Tactic tactic, LinearWorkspace const& workspace,
                           cudaStream_t stream) {
    TRT_NVFP4_RETURN_IF_ERROR(dispatch_dtype(args.dtype, [&](auto element) {
        FusedQuantizeArgs<decltype(element)> quantization{};
        quantization.m = args.m;
        quantization.k = args.k;
        quantization.x = static_cast<decltype(element) const*>(args.x);
        quantization.given_scale = args.input_tensor_scale;
        quantization.out = workspace.quantized;
        return launch_norm_quantize(quantization, nullptr, args.static_scales != 0, stream);
    }));
    W4A4Gemm gemm{};
    gemm.m = args.m;
    gemm.n = args.n;
    gemm.k = args.k + args.residual_channels;
    gemm.a = workspace.quantized.rows();
    gemm.w = weight_rows(args.weight, args.n, gemm.k, 0);
    gemm.dtype = args.dtype;
    gemm.bias = args.weight.bias;
    gemm.activation = args.activation;
    gemm.out = args.y;
    return launch_w4a4_dense(w4a4_kernels(tactic), gemm, workspace.partials, stream);
}

TrtNvfp4Status validate(TrtNvfp4LinearArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "NVFP4Linear: no arguments"));
    if (w4a16::is_arithmetic_of(*args)) {
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4Linear", w4a16::is_linked(*args), "w4a16"));
    }
    if (w4a4_fits(*args)) TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4Linear", w4a4_is_linked(), "w4a4"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("NVFP4Linear", args->m));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("NVFP4Linear: N", args->n));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4Linear: K", args->k));
    TRT_NVFP4_RETURN_IF_ERROR(require_scale_search("NVFP4Linear", args->scale_search));
    TRT_NVFP4_RETURN_IF_ERROR(
        require_residual("NVFP4Linear", args->residual_channels, args->quantize_activations != 0, args->k));
    return require_activation("NVFP4Linear", args->activation, false);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4LinearWorkspace(TrtNvfp4LinearArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::LinearWorkspace(*args, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4LinearTactics(TrtNvfp4LinearArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = trt_nvfp4::tactics_of(*args);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Linear(TrtNvfp4LinearArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    LinearWorkspace const pieces(*args, workspace);
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("NVFP4Linear", pieces.size, bytes));
    TrtNvfp4Tactic const tactic = resolve_tactic(*args);
    if (tactic == TRT_NVFP4_TACTIC_AUTO) return unsupported_tactic("NVFP4Linear", args->tactic);
    if (args->m == 0) return TRT_NVFP4_SUCCESS;
    if (is_w4a16(tactic)) return w4a16::launch(*args, workspace, stream);
    if (tactic != TRT_NVFP4_TACTIC_GENERIC) return w4a4_linear(*args, tactic, pieces, stream);
    return dispatch_dtype(args->dtype,
                          [&](auto element) { return generic_linear<decltype(element)>(*args, pieces, stream); });
}
