#include "api/launch.h"
#include "api/moe/moe_plan.h"
#include "api/moe/w4a4_moe.h"
#include "generic/generic_quantize.cuh"
#include "heuristics/w4a4.h"
#include "moe/moe_sum.cuh"
#include "w4a4/w4a4_pairs.cuh"

namespace trt_nvfp4::w4a4 {
namespace {

// The routed experts, or the shared one, which is one expert that takes all rows.
struct Experts {
    TrtNvfp4Weight up, down;
    int64_t count, intermediate, rows;  // rows: with what pads the tiles
    WorkItem const* items;
    int const* item_count;
    Nvfp4Matrix input{}, hidden{};
    float* sums = nullptr;  // [pairs or tokens, hidden size]
};

struct Layout {
    MoePlan plan;
    int64_t items;
    Experts routed{}, shared{};
    size_t size;

    Layout(TrtNvfp4MoeArgs const& args, void* base) {
        Workspace workspace(base);
        int64_t const pairs = args.m * args.top_k;
        plan = take_plan(workspace, args.m, args.top_k, args.experts);
        items = most_items(pairs, args.experts, kW4a4ExpertRows);
        routed = {args.up,    args.down,      args.experts, args.intermediate, items * kW4a4ExpertRows,
                  plan.items, plan.item_count};
        take(workspace, args, pairs, routed);
        if (args.shared) {
            shared = {args.shared_up, args.shared_down, 1, args.shared_intermediate, args.m, nullptr, nullptr};
            take(workspace, args, args.m, shared);
        }
        size = workspace.size();
    }

 private:
    static void take(Workspace& workspace, TrtNvfp4MoeArgs const& args, int64_t outputs, Experts& experts) {
        experts.input = take_nvfp4_matrix(workspace, experts.rows, args.hidden, args);
        experts.hidden = take_nvfp4_matrix(workspace, experts.rows, experts.intermediate, args);
        experts.sums = workspace.take<float>(outputs * args.hidden);
    }
};

// What the experts' two GEMMs have in common.
W4A4ExpertsGemm gemm_of(TrtNvfp4MoeArgs const& args, Experts const& experts, TrtNvfp4Weight const& weight, int64_t n,
                        int64_t k, Nvfp4Matrix const& a) {
    W4A4ExpertsGemm gemm{};
    gemm.m = experts.rows;
    gemm.n = n;
    gemm.k = k + args.residual_channels;
    gemm.a = a.rows();
    gemm.w = weight_rows(weight, n, gemm.k, 0);
    gemm.dtype = args.dtype;
    gemm.bias = weight.bias;
    gemm.experts = experts.count;
    gemm.items = experts.items;
    gemm.item_count = experts.item_count;
    return gemm;
}

// From the quantized input to the sums. Where the hidden tensor scale may be 0 the first GEMM runs twice: once to find
// the amax, so that hidden values are never stored in a wider type.
TrtNvfp4Status run_experts(TrtNvfp4MoeArgs const& args, Experts const& experts, W4A4ExpertsLaunch launch,
                           cudaStream_t stream) {
    int64_t const up_rows = args.gated ? 2 * experts.intermediate : experts.intermediate;
    W4A4ExpertsGemm up = gemm_of(args, experts, experts.up, up_rows, args.hidden, experts.input);
    up.write = args.gated ? ExpertsWrite::kGated : ExpertsWrite::kPlain;
    up.activation = args.activation;
    up.alpha = args.alpha;
    up.limit = args.limit;
    up.hidden = experts.hidden;
    up.hidden_scale = args.hidden_tensor_scale;
    if (!args.static_scales) {
        up.amax_pass = true;
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(up.hidden.amax_bits, 0, sizeof(uint32_t), stream), "clear amax"));
        TRT_NVFP4_RETURN_IF_ERROR(launch(up, stream));
    }
    up.amax_pass = false;
    TRT_NVFP4_RETURN_IF_ERROR(launch(up, stream));

    W4A4ExpertsGemm down = gemm_of(args, experts, experts.down, args.hidden, experts.intermediate, experts.hidden);
    down.write = ExpertsWrite::kSums;
    down.partials = experts.sums;
    return launch(down, stream);
}

template <typename T>
TrtNvfp4Status run(TrtNvfp4MoeArgs const& args, void* workspace, cudaStream_t stream) {
    W4A4ExpertsLaunch const launch = w4a4_kernels(TRT_NVFP4_TACTIC_W4A4).experts;
    Layout const layout(args, workspace);
    T const* const x = static_cast<T const*>(args.x);
    bool const scale_input = args.scale_input != 0;
    bool const static_scales = args.static_scales != 0;
    TRT_NVFP4_RETURN_IF_ERROR(launch_plan<T>(route_args(args, layout.plan, 0, args.m, kW4a4ExpertRows), stream));
    PairInput<T> const input{x, args.hidden, args.top_k, scale_input ? layout.plan.weights : nullptr};
    Nvfp4PairRows const rows{args.input_tensor_scale, layout.routed.input};
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize_pairs(input, args.m, layout.items, layout.plan, args.input_tensor_scale,
                                                    static_scales, rows.out.amax_bits, rows, stream));
    TRT_NVFP4_RETURN_IF_ERROR(run_experts(args, layout.routed, launch, stream));
    if (args.shared) {
        TRT_NVFP4_RETURN_IF_ERROR(launch_quantize(x, args.m, args.hidden, args.input_tensor_scale, static_scales,
                                                  layout.shared.input, stream));
        TRT_NVFP4_RETURN_IF_ERROR(run_experts(args, layout.shared, launch, stream));
    }
    return launch_moe_sum(layout.routed.sums, layout.shared.sums, 1, args.m, args.hidden, args.top_k, scale_input,
                          layout.plan, static_cast<T*>(args.y), SumStart::kEarly, stream);
}

}  // namespace

size_t workspace_bytes(TrtNvfp4MoeArgs const& args) { return Layout(args, nullptr).size; }

TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return args.dtype == TRT_NVFP4_FLOAT16 ? run<__half>(args, workspace, stream)
                                           : run<__nv_bfloat16>(args, workspace, stream);
}

}  // namespace trt_nvfp4::w4a4
