// The persistent kernels of decoder layers, by number of tokens and head size; types and caches in sources of their
// own.
#pragma once

#include "api/launch.h"
#include "decoder/decoder_args.cuh"

namespace trt_nvfp4::decoder {

constexpr int kLargestHead = 256;
constexpr int kLargestHeadOfExperts = 128;

template <typename T>
struct DecoderKernel {
    void (*function)(DecoderArgs<T>);
    int chunk_bytes;                                // of activations in shared memory
    int (*attention_bytes)(int tokens, int warps);  // that attention takes in their place
    int attention_parts;                            // warps that share attention's keys, at least
    bool whole;                                     // warps may not have parts of two tiles, but of experts
};

// For m tokens; with experts, of heads up to kLargestHeadOfExperts.
template <typename T, bool kFp8>
TRT_NVFP4_OPTIONAL DecoderKernel<T> find_kernel(int m, int head_dim, bool experts);

}  // namespace trt_nvfp4::decoder
