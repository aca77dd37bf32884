#include "api/moe/fp8_experts.h"
#include "api/moe/moe_plan.h"
#include "formats/fp8_quantize.cuh"
#include "fp8/fp8_pairs.cuh"
#include "heuristics/fp8.h"
#include "moe/moe_sum.cuh"

namespace trt_nvfp4::fp8 {
namespace {

// The routed experts, or the shared one, which is one expert that takes all rows.
struct Experts {
    TrtNvfp4Fp8Weight up, down;
    int64_t count, intermediate, rows;  // rows: with what pads the tiles
    WorkItem const* items;
    int const* item_count;
    uint8_t* input = nullptr;         // E4M3 [rows, hidden size]
    uint8_t* hidden = nullptr;        // E4M3 [rows, intermediate]
    float* sums = nullptr;            // [pairs or tokens, hidden size]
    uint32_t* hidden_amax = nullptr;  // [1]
};

struct Layout {
    int tile_rows;
    MoePlan plan;
    int64_t items;
    Experts routed{}, shared{};
    uint32_t* input_amax;   // [1], of the routed experts
    uint32_t* shared_amax;  // of launch_fp8_quantize, as is
    float* shared_scale;    // [1]
    size_t size;

    Layout(TrtNvfp4Fp8MoeArgs const& args, void* base) {
        Workspace workspace(base);
        TrtNvfp4MoeArgs const& moe = args.moe;
        int64_t const pairs = moe.m * moe.top_k;
        tile_rows = expert_rows(pairs, moe.experts);
        plan = take_plan(workspace, moe.m, moe.top_k, moe.experts);
        items = most_items(pairs, moe.experts, tile_rows);
        routed = {args.up, args.down, moe.experts, moe.intermediate, items * tile_rows, plan.items, plan.item_count};
        take(workspace, moe.hidden, pairs, routed);
        input_amax = workspace.take<uint32_t>(1);
        if (moe.shared) {
            shared = {args.shared_up, args.shared_down, 1, moe.shared_intermediate, moe.m, nullptr, nullptr};
            take(workspace, moe.hidden, moe.m, shared);
            shared_amax = workspace.take<uint32_t>(kFp8AmaxBlocks);
            shared_scale = workspace.take<float>(1);
        }
        size = workspace.size();
    }

 private:
    static void take(Workspace& workspace, int64_t hidden, int64_t outputs, Experts& experts) {
        experts.input = workspace.take<uint8_t>(experts.rows * hidden);
        experts.hidden = workspace.take<uint8_t>(experts.rows * experts.intermediate);
        experts.sums = workspace.take<float>(outputs * hidden);
        experts.hidden_amax = workspace.take<uint32_t>(1);
    }
};

// What the experts' two GEMMs have in common.
Fp8ExpertsGemm gemm_of(TrtNvfp4MoeArgs const& moe, Experts const& experts, TrtNvfp4Fp8Weight const& weight, int64_t n,
                       int64_t k, Fp8Rows const& a) {
    Fp8ExpertsGemm gemm{};
    gemm.m = experts.rows;
    gemm.n = n;
    gemm.k = k;
    gemm.a = a;
    gemm.w = {static_cast<uint8_t const*>(weight.values), weight.scales};
    gemm.dtype = moe.dtype;
    gemm.bias = weight.bias;
    gemm.splits = 1;
    gemm.experts = experts.count;
    gemm.items = experts.items;
    gemm.item_count = experts.item_count;
    return gemm;
}

// From the quantized input to the sums. Where the hidden scale may be 0 the first GEMM runs twice: once to find the
// amax, so that hidden values are never stored in a wider type.
TrtNvfp4Status run_experts(TrtNvfp4MoeArgs const& moe, Experts const& experts, Fp8Scale const& input_scale,
                           ExpertsLaunch launch, cudaStream_t stream) {
    Fp8Scale const hidden_scale{moe.hidden_tensor_scale, experts.hidden_amax};
    Fp8ExpertsGemm up =
        gemm_of(moe, experts, experts.up, 2 * experts.intermediate, moe.hidden, {experts.input, input_scale});
    up.write = ExpertsWrite::kGated;
    up.activation = moe.activation;
    up.alpha = moe.alpha;
    up.limit = moe.limit;
    up.hidden = experts.hidden;
    up.hidden_scale = hidden_scale;
    up.hidden_amax = experts.hidden_amax;
    if (!moe.static_scales) {
        up.amax_pass = true;
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(experts.hidden_amax, 0, sizeof(uint32_t), stream), "clear amax"));
        TRT_NVFP4_RETURN_IF_ERROR(launch(up, stream));
    }
    up.amax_pass = false;
    TRT_NVFP4_RETURN_IF_ERROR(launch(up, stream));

    Fp8ExpertsGemm down =
        gemm_of(moe, experts, experts.down, moe.hidden, experts.intermediate, {experts.hidden, hidden_scale});
    down.write = ExpertsWrite::kSums;
    down.out = experts.sums;
    return launch(down, stream);
}

template <typename T>
TrtNvfp4Status run(TrtNvfp4Fp8MoeArgs const& args, void* workspace, cudaStream_t stream) {
    TrtNvfp4MoeArgs const& moe = args.moe;
    Layout const layout(args, workspace);
    MoePlan const& plan = layout.plan;
    ExpertsLaunch const launch = kernels().experts(layout.tile_rows);
    T const* const x = static_cast<T const*>(moe.x);
    bool const scale_input = moe.scale_input != 0;
    bool const static_scales = moe.static_scales != 0;
    TRT_NVFP4_RETURN_IF_ERROR(launch_plan<T>(route_args(moe, plan, 0, moe.m, layout.tile_rows), stream));
    PairInput<T> const input{x, moe.hidden, moe.top_k, scale_input ? plan.weights : nullptr};
    Fp8Scale const input_scale{moe.input_tensor_scale, layout.input_amax};
    TRT_NVFP4_RETURN_IF_ERROR(launch_quantize_pairs(
        input, moe.m, layout.items, plan, moe.input_tensor_scale, static_scales, layout.input_amax,
        Fp8PairRows{layout.tile_rows, input_scale, layout.routed.input}, stream));
    TRT_NVFP4_RETURN_IF_ERROR(run_experts(moe, layout.routed, input_scale, launch, stream));
    if (moe.shared) {
        Fp8Quantization const quantization{
            moe.input_tensor_scale, layout.shared_amax, layout.shared.input, layout.shared_scale, nullptr, 0};
        TRT_NVFP4_RETURN_IF_ERROR(
            launch_fp8_quantize(x, moe.m * moe.hidden, quantization, static_scales, true, stream));
        TRT_NVFP4_RETURN_IF_ERROR(run_experts(moe, layout.shared, {layout.shared_scale, nullptr}, launch, stream));
    }
    return launch_moe_sum(layout.routed.sums, layout.shared.sums, 1, moe.m, moe.hidden, moe.top_k, scale_input, plan,
                          static_cast<T*>(moe.y), SumStart::kEarly, stream);
}

}  // namespace

size_t workspace_bytes(TrtNvfp4Fp8MoeArgs const& args) { return Layout(args, nullptr).size; }

TrtNvfp4Status launch(TrtNvfp4Fp8MoeArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return args.moe.dtype == TRT_NVFP4_FLOAT16 ? run<__half>(args, workspace, stream)
                                               : run<__nv_bfloat16>(args, workspace, stream);
}

}  // namespace trt_nvfp4::fp8
