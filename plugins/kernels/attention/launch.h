// The tensor cores' kernels of cached attention, by head size; each in a source of its own.
#pragma once

#include <type_traits>

#include "api/launch.h"
#include "attention/args.cuh"

namespace trt_nvfp4::attention {

struct Partials;

// `head_dim` is a multiple of 16 and at most 256; `queries` as prepare leaves them (decode: or null).
template <typename T, bool kFp8>
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch_decode(Args<T> const& args, void const* queries, Partials const& partials,
                                                cudaStream_t stream);
template <typename T, bool kFp8>
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch_prefill(Args<T> const& args, void const* queries, cudaStream_t stream);

// By wgmma (SM90), of 16-bit caches.
constexpr bool serves_wide_prefill(int head_dim) { return head_dim > 64 && head_dim <= 128; }
template <typename T>
TRT_NVFP4_OPTIONAL TrtNvfp4Status launch_wide_prefill(Args<T> const& args, void const* queries, cudaStream_t stream);

// Blocks of decode that find room on an SM at once.
TRT_NVFP4_OPTIONAL int decode_blocks_per_sm(int head_dim, bool fp8, int shared_bytes_per_sm);

// Calls f with the smallest size of head that the kernels are compiled for and that holds `head_dim`.
template <typename F>
auto dispatch_head_dim(int64_t head_dim, F&& f) {
    if (head_dim <= 64) return f(std::integral_constant<int, 64>{});
    if (head_dim <= 128) return f(std::integral_constant<int, 128>{});
    return f(std::integral_constant<int, 256>{});
}

}  // namespace trt_nvfp4::attention
