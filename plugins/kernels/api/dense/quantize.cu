#include "api/validate.h"
#include "formats/fused_quantize.cuh"

namespace trt_nvfp4 {
namespace {

struct QuantizeWorkspace {
    void* normalized = nullptr;  // T [m, k], of rows too long for fused_quantize
    uint32_t* amax_bits;         // [m, at least 1]
    size_t size;

    QuantizeWorkspace(TrtNvfp4QuantizeArgs const& args, void* base) {
        Workspace workspace(base);
        int64_t const element = element_size(args.dtype);
        if (args.norm && !fused_quantize_fits(args.k, element)) {
            normalized = workspace.take<uint8_t>(args.m * args.k * element);
        }
        amax_bits = workspace.take<uint32_t>(std::max<int64_t>(args.m, 1));
        size = workspace.size();
    }
};

template <typename T>
TrtNvfp4Status quantize(TrtNvfp4QuantizeArgs const& args, QuantizeWorkspace const& workspace, cudaStream_t stream) {
    FusedQuantizeArgs<T> fused{};
    fused.m = args.m;
    fused.k = args.k;
    fused.x = static_cast<T const*>(args.x);
    fused.residual = args.add_residual ? static_cast<T const*>(args.residual) : nullptr;
    fused.norm_weight = args.norm ? static_cast<T const*>(args.norm_weight) : nullptr;
    fused.epsilon = args.epsilon;
    fused.r = static_cast<T*>(args.residual_out);
    fused.given_scale = args.tensor_scale;
    fused.out = {static_cast<uint8_t*>(args.packed),
                 static_cast<uint8_t*>(args.block_scales),
                 args.tensor_scale_out,
                 workspace.amax_bits,
                 args.scale_search,
                 args.residual_channels};
    return launch_norm_quantize(fused, workspace.normalized, false, stream);
}

TrtNvfp4Status validate(TrtNvfp4QuantizeArgs const* args) {
    TRT_NVFP4_RETURN_IF_ERROR(require(args != nullptr, "NVFP4Quantize: no arguments"));
    TRT_NVFP4_RETURN_IF_ERROR(require_rows("NVFP4Quantize", args->m));
    TRT_NVFP4_RETURN_IF_ERROR(require_scale_search("NVFP4Quantize", args->scale_search));
    TRT_NVFP4_RETURN_IF_ERROR(require_blocks("NVFP4Quantize: K", args->k));
    return require_residual("NVFP4Quantize", args->residual_channels, true, args->k);
}

}  // namespace
}  // namespace trt_nvfp4

TrtNvfp4Status trtNvfp4QuantizeWorkspace(TrtNvfp4QuantizeArgs const* args, size_t* bytes) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *bytes = trt_nvfp4::QuantizeWorkspace(*args, nullptr).size;
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4QuantizeTactics(TrtNvfp4QuantizeArgs const* args, TrtNvfp4Tactics* tactics) {
    TRT_NVFP4_RETURN_IF_ERROR(trt_nvfp4::validate(args));
    *tactics = {1, 1, {TRT_NVFP4_TACTIC_GENERIC}};
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Quantize(TrtNvfp4QuantizeArgs const* args, void* workspace, size_t bytes,
                                TrtNvfp4Stream stream) {
    using namespace trt_nvfp4;
    TRT_NVFP4_RETURN_IF_ERROR(validate(args));
    QuantizeWorkspace const pieces(*args, workspace);
    TRT_NVFP4_RETURN_IF_ERROR(require_workspace("NVFP4Quantize", pieces.size, bytes));
    return dispatch_dtype(args->dtype,
                          [&](auto element) { return quantize<decltype(element)>(*args, pieces, stream); });
}
