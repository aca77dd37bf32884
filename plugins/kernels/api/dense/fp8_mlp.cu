#include "api/validate.h"
#include "formats/fp8_quantize.cuh"
#include "generic/generic_gemm.cuh"
#include "heuristics/tactics.h"

namespace trt_nvfp4 {
namespace {

struct Fp8Workspace {
    uint8_t* input;      // E4M3 [m, hidden_in], as hidden in room for whole tiles
    uint8_t* hidden;     // E4M3 [m, intermediate]
    float* wide_hidden;  // [m, intermediate]; the generic kernels' hidden values before they are quantized
    float* input_scale;
    float* hidden_scale;
    uint32_t* block_amax;
    uint32_t* counters;  // the amax of the hidden values, then the splits' arrivals
    float* partials;
    size_t size;

    Fp8Workspace(TrtNvfp4Fp8MlpArgs const& args, void* base) {
        Workspace workspace(base);
        int64_t const rows = padded_fp8_rows(args.m);
        input = workspace.take<uint8_t>(rows * args.hidden_in);
        hidden = workspace.take<uint8_t>(rows * args.intermediate);
        bool const tensor_cores = args.tactic == TRT_NVFP4_TACTIC_FP8 ||
                                  (args.tactic == TRT_NVFP4_TACTIC_AUTO && fp8::kMlpsEverywhere && fp8::fits(args));
        wide_hidden = workspace.take<float>(tensor_cores ? 0 : args.m * args.intermediate);
        input_scale = workspace.take<float>(1);
        hidden_scale = workspace.take<float>(1);
        block_amax = workspace.take<uint32_t>(kFp8AmaxBlocks);
        counters = workspace.take<uint32_t>(1 + fp8::kMaxArrivals);
        partials = workspace.take<float>(fp8::kMaxPartials);
        size = workspace.size();
    }
};

template <typename T>
TrtNvfp4Status generic_mlp(TrtNvfp4Fp8MlpArgs const& args, Fp8Workspace const& workspace, cudaStream_t stream) {
    auto const weight = [](TrtNvfp4Fp8Weight const& w) {
        return Fp8Channels{static_cast<uint8_t const*>(w.values), w.scales};
    };
    GemmArgs<T, float, Fp8Channels> up{};
    up.m = args.m;
    up.n = 2 * args.intermediate;
    up.k = args.hidden_in;
    up.w = weight(args.up);
    up.bias = static_cast<T const*>(args.up.bias);
    up.activation = args.activation;
    up.gated = 1;
    up.alpha = args.alpha;
    up.limit = args.limit;
    up.out = workspace.wide_hidden;
    TRT_NVFP4_RETURN_IF_ERROR(launch_gemm(Fp8Rows{workspace.input, {workspace.input_scale, nullptr}}, up, stream));
    Fp8Quantization const quantization{
        args.hidden_scale, workspace.block_amax, workspace.hidden, workspace.hidden_scale, nullptr, 0};
    TRT_NVFP4_RETURN_IF_ERROR(launch_fp8_quantize(workspace.wide_hidden, args.m * args.intermediate, quantization,
                                                  args.static_scales != 0, false, stream));
    GemmArgs<T, T, Fp8Channels> down{};
    down.m = args.m;
    down.n = args.hidden_out;
    down.k = args.intermediate;
    down.w = weight(args.down);
    down.bias = static_cast<T const*>(args.down.bias);
    down.out = static_cast<T*>(args.y);
    return launch_gemm(Fp8Rows{workspace.hidden, {workspace.hidden_scale, nullptr}}, down, stream);
}

// h leaves the first GEMM in E4M3. Where its scale is 0 that GEMM runs twice, the first time to find the amax.
TrtNvfp4Status tensor_core_mlp(TrtNvfp4Fp8MlpArgs const& args, fp8::Kernels const& kernels,
                               Fp8Workspace const& workspace, cudaStream_t stream) {
    Fp8Scale const hidden_scale{args.hidden_scale, workspace.counters};
    Fp8Gemm up{};
    up.m = args.m;
    up.n = 2 * args.intermediate;
    up.k = args.hidden_in;
    up.a = {workspace.input, {workspace.input_scale, nullptr}};
    up.w = {static_cast<uint8_t const*>(args.up.values), args.up.scales};
    up.dtype = args.dtype;
    up.bias = args.up.bias;
    up.splits = 1;
    up.activation = args.activation;
    up.alpha = args.alpha;
    up.limit = args.limit;
    up.hidden = workspace.hidden;
    up.hidden_scale = hidden_scale;
    up.hidden_amax = workspace.counters;
    fp8::Launch const gated = kernels.gated(up);
    if (!args.static_scales) {
        up.amax_pass = true;
        TRT_NVFP4_RETURN_IF_ERROR(gated(up, stream));
        up.amax_pass = false;
    }
    TRT_NVFP4_RETURN_IF_ERROR(gated(up, stream));

    Fp8Gemm down{};
    down.m = args.m;
    down.n = args.hidden_out;
    down.k = args.intermediate;
    down.a = {workspace.hidden, hidden_scale};
    down.w = {static_cast<uint8_t const*>(args.down.values), args.down.scales};
    down.dtype = args.dtype;
    down.bias = args.down.bias;
    down.out = args.y;
    down.partials = workspace.partials;
    down.arrivals = workspace.counters + 1;
    fp8::Split const dense = kernels.dense(down);
    down.splits = dense.splits;
    return dense.launch(down, stream);
}

TrtNvfp4Status validate(TrtNvfp4Fp8MlpArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "FP8GatedMLP: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("FP8GatedMLP", args->m));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("FP8GatedMLP: the input size", args->hidden_in));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("FP8GatedMLP: the intermediate size", args->intermediate));
    TRT_NVFP4_RETURN_IF_ERROR(require_positive("FP8GatedMLP: the output size", args->hidden_out));
    return require_activation("FP8GatedMLP", args->activation, true);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4Fp8MlpWorkspace(TrtNvfp4Fp8MlpArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::Fp8Workspace(*args, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Fp8MlpTactics(TrtNvfp4Fp8MlpArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = trt_nvfp4::tactics_of(*args);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Fp8Mlp(TrtNvfp4Fp8MlpArgs const* args, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    Fp8Workspace const pieces(*args, workspace);
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("FP8GatedMLP", pieces.size, bytes));
    TrtNvfp4Tactic const tactic = resolve_tactic(*args);
    if (tactic == TRT_NVFP4_TACTIC_AUTO) return unsupported_tactic("FP8GatedMLP", args->tactic);
    bool const generic = tactic == TRT_NVFP4_TACTIC_GENERIC;
    fp8::Kernels const kernels = fp8::kernels();
    if (args->m == 0) return TRT_NVFP4_SUCCESS;
    return dispatch_dtype(args->dtype, [&](auto element) {
        using T = decltype(element);
        Fp8Quantization const quantization{args->input_scale,  pieces.block_amax, pieces.input,
                                           pieces.input_scale, pieces.counters,   1 + fp8::kMaxArrivals};
        TRT_NVFP4_RETURN_IF_ERROR(launch_fp8_quantize(static_cast<T const*>(args->x), args->m * args->hidden_in,
                                                      quantization, args->static_scales != 0,
                                                      !generic && kernels.programmatic, stream));
        return generic ? generic_mlp<T>(*args, pieces, stream) : tensor_core_mlp(*args, kernels, pieces, stream);
    });
}
