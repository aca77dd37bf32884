// Stands in for the kernels' C API under the adapters, on the CPU: y[0] tells which tactic an enqueue ran, y[1] how
// much workspace it had. Tactics depend on the tokens m: 2 up to 16; 2 or 6 up to 64; 4 or 3 above; 1 always. 1 needs
// most workspace.
#include "kernels/api/launch.h"

namespace {

TrtNvfp4Tactics tactics_of(int64_t m) {
    if (m <= 16) return {2, 1, {TRT_NVFP4_TACTIC_W4A16, TRT_NVFP4_TACTIC_GENERIC}};
    if (m <= 64) {
        return {3, 2, {TRT_NVFP4_TACTIC_W4A16, TRT_NVFP4_TACTIC_W4A16_MMA_SYNC, TRT_NVFP4_TACTIC_GENERIC}};
    }
    return {3, 2, {TRT_NVFP4_TACTIC_W4A4_PAIR, TRT_NVFP4_TACTIC_W4A4, TRT_NVFP4_TACTIC_GENERIC}};
}

}  // namespace

TrtNvfp4Status trtNvfp4LinearWorkspace(TrtNvfp4LinearArgs const* args, size_t* bytes) {
    *bytes = args->m * (args->tactic == TRT_NVFP4_TACTIC_GENERIC ? 100
                        : args->tactic == TRT_NVFP4_TACTIC_AUTO  ? 10
                                                                 : 5);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4LinearTactics(TrtNvfp4LinearArgs const* args, TrtNvfp4Tactics* tactics) {
    *tactics = tactics_of(args->m);
    return TRT_NVFP4_SUCCESS;
}

TrtNvfp4Status trtNvfp4Linear(TrtNvfp4LinearArgs const* args, void*, size_t bytes, TrtNvfp4Stream) {
    if (args->activation == TRT_NVFP4_RELU) {
        return trt_nvfp4::check_cuda(cudaErrorLaunchOutOfResources, "fake_kernel");
    }
    if (args->activation == TRT_NVFP4_RELU2) {
        return trt_nvfp4::check_cuda(cudaErrorNoKernelImageForDevice, "fake_kernel");
    }
    static_cast<float*>(args->y)[0] = static_cast<float>(args->tactic);
    static_cast<float*>(args->y)[1] = static_cast<float>(bytes);
    return TRT_NVFP4_SUCCESS;
}

// The other ops are not used.
#define TRT_NVFP4_FAKE(Name, Args)                                                                          \
    TrtNvfp4Status trtNvfp4##Name##Workspace(Args const*, size_t*) { return TRT_NVFP4_UNSUPPORTED; }        \
    TrtNvfp4Status trtNvfp4##Name##Tactics(Args const*, TrtNvfp4Tactics*) { return TRT_NVFP4_UNSUPPORTED; } \
    TrtNvfp4Status trtNvfp4##Name(Args const*, void*, size_t, TrtNvfp4Stream) { return TRT_NVFP4_UNSUPPORTED; }
TRT_NVFP4_FAKE(Mlp, TrtNvfp4MlpArgs)
TRT_NVFP4_FAKE(Quantize, TrtNvfp4QuantizeArgs)
TRT_NVFP4_FAKE(Fp8Mlp, TrtNvfp4Fp8MlpArgs)
TRT_NVFP4_FAKE(Moe, TrtNvfp4MoeArgs)
TRT_NVFP4_FAKE(Fp8Moe, TrtNvfp4Fp8MoeArgs)
TRT_NVFP4_FAKE(Attention, TrtNvfp4AttentionArgs)
TRT_NVFP4_FAKE(Decoder, TrtNvfp4DecoderArgs)
TRT_NVFP4_FAKE(LinearAttention, TrtNvfp4LinearAttentionArgs)
TRT_NVFP4_FAKE(CausalConv, TrtNvfp4CausalConvArgs)
