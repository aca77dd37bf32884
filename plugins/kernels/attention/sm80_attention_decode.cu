#include <algorithm>

#include "attention/launch.h"
#include "attention/sm80_attention_combine.cuh"
#include "attention/sm80_attention_decode.cuh"

namespace trt_nvfp4::attention {

template <typename T, bool kFp8>
TrtNvfp4Status launch_decode(Args<T> const& args, void const* queries, Partials const& partials, cudaStream_t stream) {
    return dispatch_head_dim(args.head_dim, [&](auto size) {
        constexpr int kHeadDim = decltype(size)::value;
        using Config = Decode<T, kFp8, kHeadDim>;
        unsigned const chunks = (args.rows() + kRows - 1) / kRows;
        dim3 const blocks(partials.slots, args.kv_heads * chunks);
        TRT_NVFP4_RETURN_IF_ERROR(launch_kernel(sm80_attention_decode<T, kFp8, kHeadDim>, blocks, Config::kThreads,
                                                Config::kSharedBytes, true, stream, "sm80_attention_decode", args,
                                                static_cast<Operand<T, kFp8> const*>(queries), partials));
        dim3 const rows(args.rows(), args.kv_heads, args.batch);
        return launch_kernel(sm80_attention_combine<T, kFp8, kHeadDim>, rows, kCombineThreads, 0, true, stream,
                             "sm80_attention_combine", args, Config::kKeys, partials);
    });
}

template TrtNvfp4Status launch_decode<__half, false>(Args<__half> const&, void const*, Partials const&, cudaStream_t);
template TrtNvfp4Status launch_decode<__half, true>(Args<__half> const&, void const*, Partials const&, cudaStream_t);
template TrtNvfp4Status launch_decode<__nv_bfloat16, false>(Args<__nv_bfloat16> const&, void const*, Partials const&,
                                                            cudaStream_t);
template TrtNvfp4Status launch_decode<__nv_bfloat16, true>(Args<__nv_bfloat16> const&, void const*, Partials const&,
                                                           cudaStream_t);

int decode_blocks_per_sm(int head_dim, bool fp8, int shared_bytes_per_sm) {
    return dispatch_head_dim(head_dim, [&](auto size) {
        constexpr int kHeadDim = decltype(size)::value;
        constexpr int kReserved = 1024;  // by the system, of a block
        int const bytes =
            fp8 ? Decode<__half, true, kHeadDim>::kSharedBytes : Decode<__half, false, kHeadDim>::kSharedBytes;
        constexpr int most = Decode<__half, false, kHeadDim>::kMostBlocks;
        return std::clamp(shared_bytes_per_sm / (bytes + kReserved), 1, most);
    });
}

}  // namespace trt_nvfp4::attention
