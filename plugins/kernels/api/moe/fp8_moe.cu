#include "api/moe/fp8_experts.h"
#include "api/moe/moe_plan.h"
#include "formats/fp8_quantize.cuh"
#include "generic/generic_moe.cuh"
#include "heuristics/tactics.h"
#include "moe/moe_sum.cuh"

namespace trt_nvfp4 {
namespace {

// One mixture or one expert, by the generic kernels: rows are pairs in sorted order, or tokens for the shared expert.
struct Fp8GenericMlp {
    TrtNvfp4Fp8Weight up, down;
    int64_t rows, intermediate;
    uint8_t *input, *hidden;  // E4M3 [rows, hidden size], [rows, intermediate]
    float* wide_hidden;       // [rows, intermediate], before they are quantized
    float* outputs;           // [rows, hidden size]
    float *input_scale, *hidden_scale;

    Fp8GenericMlp(Workspace& workspace, TrtNvfp4Fp8Weight const& up, TrtNvfp4Fp8Weight const& down, int64_t rows,
                  int64_t size, int64_t intermediate)
        : up(up), down(down), rows(rows), intermediate(intermediate) {
        input = workspace.take<uint8_t>(rows * size);
        hidden = workspace.take<uint8_t>(rows * intermediate);
        wide_hidden = workspace.take<float>(rows * intermediate);
        outputs = workspace.take<float>(rows * size);
        input_scale = workspace.take<float>(1);
        hidden_scale = workspace.take<float>(1);
    }
};

struct Fp8MoeWorkspace {
    MoePlan plan;
    void* gathered;  // T [pairs, hidden]
    uint32_t* block_amax;
    Fp8GenericMlp routed, shared;
    size_t size;

    Fp8MoeWorkspace(TrtNvfp4Fp8MoeArgs const& args, void* base) : Fp8MoeWorkspace(args, Workspace(base)) {}

 private:
    Fp8MoeWorkspace(TrtNvfp4Fp8MoeArgs const& args, Workspace workspace)
        : plan(take_plan(workspace, args.moe.m, args.moe.top_k, args.moe.experts)),
          gathered(
              workspace.take<uint8_t>(args.moe.m * args.moe.top_k * args.moe.hidden * element_size(args.moe.dtype))),
          block_amax(workspace.take<uint32_t>(kFp8AmaxBlocks)),
          routed(workspace, args.up, args.down, args.moe.m * args.moe.top_k, args.moe.hidden, args.moe.intermediate),
          shared(workspace, args.shared_up, args.shared_down, args.moe.shared ? args.moe.m : 0, args.moe.hidden,
                 args.moe.shared_intermediate),
          size(workspace.size()) {}
};

// up and down, `launch` being the dense or the grouped GEMM.
template <typename T, typename Launch>
TrtNvfp4Status run_experts(TrtNvfp4MoeArgs const& moe, Fp8GenericMlp const& mlp, T const* x, uint32_t* block_amax,
                           Launch&& launch, cudaStream_t stream) {
    bool const static_scales = moe.static_scales != 0;
    auto const channels = [](TrtNvfp4Fp8Weight const& weight) {
        return Fp8Channels{static_cast<uint8_t const*>(weight.values), weight.scales};
    };
    TRT_NVFP4_RETURN_IF_ERROR(launch_fp8_quantize(
        x, mlp.rows * moe.hidden, {moe.input_tensor_scale, block_amax, mlp.input, mlp.input_scale, nullptr, 0},
        static_scales, false, stream));
    GemmArgs<T, float, Fp8Channels> up{};
    up.m = mlp.rows;
    up.n = moe.gated ? 2 * mlp.intermediate : mlp.intermediate;
    up.k = moe.hidden;
    up.w = channels(mlp.up);
    up.bias = static_cast<T const*>(mlp.up.bias);
    up.activation = moe.activation;
    up.gated = moe.gated;
    up.alpha = moe.alpha;
    up.limit = moe.limit;
    up.out = mlp.wide_hidden;
    TRT_NVFP4_RETURN_IF_ERROR(launch(Fp8Rows{mlp.input, {mlp.input_scale, nullptr}}, up));
    TRT_NVFP4_RETURN_IF_ERROR(launch_fp8_quantize(
        mlp.wide_hidden, mlp.rows * mlp.intermediate,
        {moe.hidden_tensor_scale, block_amax, mlp.hidden, mlp.hidden_scale, nullptr, 0}, static_scales, false, stream));
    GemmArgs<T, float, Fp8Channels> down{};
    down.m = mlp.rows;
    down.n = moe.hidden;
    down.k = mlp.intermediate;
    down.w = channels(mlp.down);
    down.bias = static_cast<T const*>(mlp.down.bias);
    down.out = mlp.outputs;
    return launch(Fp8Rows{mlp.hidden, {mlp.hidden_scale, nullptr}}, down);
}

template <typename T>
TrtNvfp4Status generic_moe(TrtNvfp4MoeArgs const& moe, Fp8MoeWorkspace const& workspace, cudaStream_t stream) {
    T const* const x = static_cast<T const*>(moe.x);
    MoePlan const& plan = workspace.plan;
    int64_t const pairs = workspace.routed.rows;
    bool const scale_input = moe.scale_input != 0;
    TRT_NVFP4_RETURN_IF_ERROR(launch_plan<T>(route_args(moe, plan, 0, moe.m, kGemmTile), stream));
    T* const rows = static_cast<T*>(workspace.gathered);
    TRT_NVFP4_RETURN_IF_ERROR(launch_moe_gather(x, moe.hidden, moe.top_k, scale_input, pairs, plan, rows, stream));
    int64_t const items = most_items(pairs, moe.experts, kGemmTile);
    auto const grouped = [&](auto const& a, auto const& gemm) {
        return launch_expert_gemm(a, gemm, items, plan, stream);
    };
    TRT_NVFP4_RETURN_IF_ERROR(
        run_experts(moe, workspace.routed, static_cast<T const*>(rows), workspace.block_amax, grouped, stream));
    if (moe.shared) {
        auto const dense = [&](auto const& a, auto const& gemm) { return launch_gemm(a, gemm, stream); };
        TRT_NVFP4_RETURN_IF_ERROR(run_experts(moe, workspace.shared, x, workspace.block_amax, dense, stream));
    }
    return launch_moe_sum(workspace.routed.outputs, moe.shared ? workspace.shared.outputs : nullptr, 1, moe.m,
                          moe.hidden, moe.top_k, scale_input, plan, static_cast<T*>(moe.y), SumStart::kBehind, stream);
}

TrtNvfp4Status validate(TrtNvfp4Fp8MoeArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "FP8MoE: no arguments"));
    return require_moe("FP8MoE", args->moe);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4Fp8MoeWorkspace(TrtNvfp4Fp8MoeArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::fp8::workspace_bytes(*args);
    if (trt_nvfp4::resolve_tactic(*args) != TRT_NVFP4_TACTIC_FP8) {
        *bytes = std::max(*bytes, trt_nvfp4::Fp8MoeWorkspace(*args, nullptr).size);
    }
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Fp8MoeTactics(TrtNvfp4Fp8MoeArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = trt_nvfp4::tactics_of(*args);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Fp8Moe(TrtNvfp4Fp8MoeArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    size_t needed = 0;
    TRT_NVFP4_RETURN_IF_ERROR(trtNvfp4Fp8MoeWorkspace(args, &needed));
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("FP8MoE", needed, bytes));
    TrtNvfp4Tactic const tactic = resolve_tactic(*args);
    if (tactic == TRT_NVFP4_TACTIC_AUTO) return unsupported_tactic("FP8MoE", args->moe.tactic);
    if (args->moe.m == 0) return TRT_NVFP4_SUCCESS;
    if (tactic == TRT_NVFP4_TACTIC_FP8) return fp8::launch(*args, workspace, stream);
    Fp8MoeWorkspace const pieces(*args, workspace);
    return dispatch_dtype(args->moe.dtype,
                          [&](auto element) { return generic_moe<decltype(element)>(args->moe, pieces, stream); });
}
