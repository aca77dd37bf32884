#include "attention/launch.h"
#include "attention/sm80_attention_prefill.cuh"

namespace trt_nvfp4::attention {

template <typename T, bool kFp8>
TrtNvfp4Status launch_prefill(Args<T> const& args, void const* queries, cudaStream_t stream) {
    return dispatch_head_dim(args.head_dim, [&](auto size) {
        constexpr int kHeadDim = decltype(size)::value;
        using Config = Prefill<T, kFp8, kHeadDim>;
        unsigned const tiles = (args.rows() + Config::kBlockRows - 1) / Config::kBlockRows;
        dim3 const blocks(tiles, args.kv_heads, args.batch);
        return launch_kernel(sm80_attention_prefill<T, kFp8, kHeadDim>, blocks, Config::kThreads, Config::kSharedBytes,
                             true, stream, "sm80_attention_prefill", args,
                             static_cast<Operand<T, kFp8> const*>(queries));
    });
}

template TrtNvfp4Status launch_prefill<__half, false>(Args<__half> const&, void const*, cudaStream_t);
template TrtNvfp4Status launch_prefill<__half, true>(Args<__half> const&, void const*, cudaStream_t);
template TrtNvfp4Status launch_prefill<__nv_bfloat16, false>(Args<__nv_bfloat16> const&, void const*, cudaStream_t);
template TrtNvfp4Status launch_prefill<__nv_bfloat16, true>(Args<__nv_bfloat16> const&, void const*, cudaStream_t);

}  // namespace trt_nvfp4::attention
