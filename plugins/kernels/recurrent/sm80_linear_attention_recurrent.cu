#include <algorithm>

#include "recurrent/sm80_linear_attention_recurrent.cuh"

namespace trt_nvfp4::recurrent {
namespace {

template <typename T, int kRows>
TrtNvfp4Status launch(Args<T> const& args, cudaStream_t stream) {
    constexpr int kBytes = 44 * 1024;  // beside the static ones, without asking for more
    TokenLayout<kRows> const layout{args.group, args.decay_dim};
    int const bytes = layout.size() * static_cast<int>(sizeof(float));
    int const tokens = std::max(1, std::min({args.tokens, kBlockTokens, kBytes / bytes}));
    unsigned const blocks = (args.value_dim + kColumns - 1) / kColumns;
    return launch_kernel(sm80_linear_attention_recurrent<T, kRows>, dim3(blocks * args.kv_heads, args.batch),
                         kRecurrentThreads, static_cast<size_t>(tokens) * bytes, true, stream,
                         "sm80_linear_attention_recurrent", args, tokens);
}

}  // namespace

template <typename T>
TrtNvfp4Status launch_recurrent(Args<T> const& args, cudaStream_t stream) {
    if (args.key_dim <= 64) return launch<T, 4>(args, stream);
    return args.key_dim <= 128 ? launch<T, 8>(args, stream) : launch<T, 16>(args, stream);
}

template TrtNvfp4Status launch_recurrent<float>(Args<float> const&, cudaStream_t);
template TrtNvfp4Status launch_recurrent<__half>(Args<__half> const&, cudaStream_t);
template TrtNvfp4Status launch_recurrent<__nv_bfloat16>(Args<__nv_bfloat16> const&, cudaStream_t);

}  // namespace trt_nvfp4::recurrent
