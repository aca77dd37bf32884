#include "api/moe/moe_plan.h"
#include "api/moe/w4a4_moe.h"
#include "api/validate.h"
#include "generic/generic_moe.cuh"
#include "generic/generic_quantize.cuh"
#include "heuristics/tactics.h"
#include "moe/moe_sum.cuh"

namespace trt_nvfp4 {
namespace {

// The generic kernels' workspace: rows are pairs in sorted order, or tokens for the shared expert.
struct MoeWorkspace {
    MoePlan plan{};
    void* rows = nullptr;           // T [pairs, hidden]
    void* activated = nullptr;      // [pairs, intermediate] in T (W4A16) or float32 (W4A4)
    float* outputs = nullptr;       // [pairs, hidden]
    void* shared_hidden = nullptr;  // as activated, of the shared expert
    float* shared = nullptr;        // [m, hidden]
    Nvfp4Matrix quantized_rows{}, quantized_hidden{}, shared_input{}, quantized_shared{};
    size_t size;

    MoeWorkspace(TrtNvfp4MoeArgs const& args, void* base) {
        Workspace workspace(base);
        int64_t const element = element_size(args.dtype);
        int64_t const hidden_element = args.quantize_activations ? 4 : element;
        int64_t const pairs = args.m * args.top_k;
        plan = take_plan(workspace, args.m, args.top_k, args.experts);
        rows = workspace.take<uint8_t>(pairs * args.hidden * element);
        activated = workspace.take<uint8_t>(pairs * args.intermediate * hidden_element);
        outputs = workspace.take<float>(pairs * args.hidden);
        if (args.quantize_activations) {
            quantized_rows = take_nvfp4_matrix(workspace, pairs, args.hidden, args);
            quantized_hidden = take_nvfp4_matrix(workspace, pairs, args.intermediate, args);
        }
        if (args.shared) {
            shared_hidden = workspace.take<uint8_t>(args.m * args.shared_intermediate * hidden_element);
            shared = workspace.take<float>(args.m * args.hidden);
            if (args.quantize_activations) {
                shared_input = take_nvfp4_matrix(workspace, args.m, args.hidden, args);
                quantized_shared = take_nvfp4_matrix(workspace, args.m, args.shared_intermediate, args);
            }
        }
        size = workspace.size();
    }
};

template <typename T, typename Hidden>
GemmArgs<T, Hidden> up_gemm(TrtNvfp4MoeArgs const& args, TrtNvfp4Weight const& weight, int64_t m, int64_t intermediate,
                            void* hidden) {
    GemmArgs<T, Hidden> gemm{};
    gemm.m = m;
    gemm.n = args.gated ? 2 * intermediate : intermediate;
    gemm.k = args.hidden + args.residual_channels;
    gemm.w = weight_rows(weight, gemm.n, gemm.k, 0);
    gemm.bias = static_cast<T const*>(weight.bias);
    gemm.activation = args.activation;
    gemm.gated = args.gated;
    gemm.alpha = args.alpha;
    gemm.limit = args.limit;
    gemm.out = static_cast<Hidden*>(hidden);
    return gemm;
}

template <typename T>
GemmArgs<T, float> down_gemm(TrtNvfp4MoeArgs const& args, TrtNvfp4Weight const& weight, int64_t m, int64_t intermediate,
                             float* out) {
    GemmArgs<T, float> gemm{};
    gemm.m = m;
    gemm.n = args.hidden;
    gemm.k = intermediate + args.residual_channels;
    gemm.w = weight_rows(weight, gemm.n, gemm.k, 0);
    gemm.bias = static_cast<T const*>(weight.bias);
    gemm.out = out;
    return gemm;
}

// up and down, `launch` being the dense or the grouped GEMM.
template <typename T, typename Launch>
TrtNvfp4Status run_experts(TrtNvfp4MoeArgs const& args, T const* x, int64_t rows, TrtNvfp4Weight const& up,
                           TrtNvfp4Weight const& down, int64_t intermediate, void* hidden, float* out,
                           Nvfp4Matrix const& quantized_x, Nvfp4Matrix const& quantized_hidden, Launch&& launch,
                           cudaStream_t stream) {
    GemmArgs<T, float> const down_args = down_gemm<T>(args, down, rows, intermediate, out);
    if (!args.quantize_activations) {
        TRT_NVFP4_RETURN_IF_ERROR(launch(DenseRows<T>{x}, up_gemm<T, T>(args, up, rows, intermediate, hidden)));
        return launch(DenseRows<T>{static_cast<T const*>(hidden)}, down_args);
    }
    TRT_NVFP4_RETURN_IF_ERROR(
        launch_quantize(x, rows, args.hidden, args.input_tensor_scale, args.static_scales != 0, quantized_x, stream));
    TRT_NVFP4_RETURN_IF_ERROR(launch(quantized_x.rows(), up_gemm<T, float>(args, up, rows, intermediate, hidden)));
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize(static_cast<float const*>(hidden), rows, intermediate,
                                              args.hidden_tensor_scale, args.static_scales != 0, quantized_hidden,
                                              stream));
    return launch(quantized_hidden.rows(), down_args);
}

template <typename T>
TrtNvfp4Status generic_moe(TrtNvfp4MoeArgs const& args, MoeWorkspace const& workspace, cudaStream_t stream) {
    T const* const x = static_cast<T const*>(args.x);
    MoePlan const& plan = workspace.plan;
    int64_t const pairs = args.m * args.top_k;
    TRT_NVFP4_RETURN_IF_ERROR(launch_plan<T>(route_args(args, plan, 0, args.m, kGemmTile), stream));
    T* const rows = static_cast<T*>(workspace.rows);
    TRT_NVFP4_RETURN_IF_ERROR(
        launch_moe_gather(x, args.hidden, args.top_k, args.scale_input != 0, pairs, plan, rows, stream));
    int64_t const items = most_items(pairs, args.experts, kGemmTile);
    auto const grouped = [&](auto const& a, auto const& gemm) {
        return launch_expert_gemm(a, gemm, items, plan, stream);
    };
    TRT_NVFP4_RETURN_IF_ERROR(run_experts(args, static_cast<T const*>(rows), pairs, args.up, args.down,
                                          args.intermediate, workspace.activated, workspace.outputs,
                                          workspace.quantized_rows, workspace.quantized_hidden, grouped, stream));
    if (args.shared) {
        auto const dense = [&](auto const& a, auto const& gemm) { return launch_gemm(a, gemm, stream); };
        TRT_NVFP4_RETURN_IF_ERROR(run_experts(args, x, args.m, args.shared_up, args.shared_down,
                                              args.shared_intermediate, workspace.shared_hidden, workspace.shared,
                                              workspace.shared_input, workspace.quantized_shared, dense, stream));
    }
    return launch_moe_sum(workspace.outputs, workspace.shared, 1, args.m, args.hidden, args.top_k,
                          args.scale_input != 0, plan, static_cast<T*>(args.y), SumStart::kBehind, stream);
}

TrtNvfp4Status validate(TrtNvfp4MoeArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "NVFP4MoE: no arguments"));
    if (w4a16::is_arithmetic_of(*args)) {
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4MoE", w4a16::is_linked(*args), "w4a16_moe"));
    }
    if (w4a4_fits(*args)) {
        TRT_NVFP4_RETURN_IF_ERROR(require_linked("NVFP4MoE", w4a4::launch != nullptr, "w4a4_moe"));
    }
    TRT_NVFP4_RETURN_IF_ERROR(require_scale_search("NVFP4MoE", args->scale_search));
    int64_t k = std::min(args->hidden, args->intermediate);
    if (args->shared) k = std::min(k, args->shared_intermediate);
    TRT_NVFP4_RETURN_IF_ERROR(
        require_residual("NVFP4MoE", args->residual_channels, args->quantize_activations != 0, k));
    return require_moe("NVFP4MoE", *args);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4MoeWorkspace(TrtNvfp4MoeArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    if (trt_nvfp4::is_w4a16(trt_nvfp4::resolve_tactic(*args))) {
        *bytes = trt_nvfp4::w4a16::workspace_bytes(*args);
        return TRT_NVFP4_SUCCESS;
    }
    *bytes = trt_nvfp4::w4a4_fits(*args) ? trt_nvfp4::w4a4::workspace_bytes(*args) : 0;
    if (trt_nvfp4::w4a4_may_be_generic(*args)) {
        *bytes = std::max(*bytes, trt_nvfp4::MoeWorkspace(*args, nullptr).size);
    }
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4MoeTactics(TrtNvfp4MoeArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = trt_nvfp4::tactics_of(*args);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Moe(TrtNvfp4MoeArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    size_t needed = 0;
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4MoeWorkspace(args, &needed));
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("NVFP4MoE", needed, bytes));
    TrtNvfp4Tactic const tactic = resolve_tactic(*args);
    if (tactic == TRT_NVFP4_TACTIC_AUTO) return unsupported_tactic("NVFP4MoE", args->tactic);
    if (args->m == 0) return TRT_NVFP4_SUCCESS;
    if (is_w4a16(tactic)) return w4a16::launch(*args, workspace, stream);
    if (tactic == TRT_NVFP4_TACTIC_W4A4) return w4a4::launch(*args, workspace, stream);
    MoeWorkspace const pieces(*args, workspace);
    return dispatch_dtype(args->dtype,
                          [&](auto element) { return generic_moe<decltype(element)>(*args, pieces, stream); });
}
