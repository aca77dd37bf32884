// Linear attention's fast kernels; each in a source of its own.
#pragma once

#include "api/launch.h"
#include "recurrent/args.cuh"

namespace trt_nvfp4::recurrent {

// Token by token; dimensions are multiples of 16 up to kMaxDim and `group` is at most kMaxGroup.
constexpr int kMaxGroup = 32;
template <typename T>
TrtNvfp4Status launch_recurrent(Args<T> const& args, cudaStream_t stream);

constexpr int kChunk = 64;
// Wider keys of the delta rules spill a register on SM90, and run token by token.
constexpr int kMaxChunkedDeltaKeys = 128;

// What the chunks' first launch leaves to the second, of as many chunks as find room.
struct ChunkWorkspace {
    void* corrections;  // T [chunks, kChunk, kChunk]: (1 + A)^-1 beta; of the delta rules
    void* scores;       // T [chunks, kChunk, kChunk]: q k below the diagonal and on it, decayed and scaled
    float* decays;      // [chunks, kChunk]: running sums of logarithms
    int64_t chunks;     // of a head
};

// By chunks; dimensions as above, but for kMaxChunkedDeltaKeys, T of 16 bits, `group` 1, at most one decay per head.
template <typename T>
TrtNvfp4Status launch_chunked(Args<T> const& args, ChunkWorkspace const& workspace, cudaStream_t stream);
// Bytes of shared memory that a block of it has at least.
int64_t chunked_shared_bytes(int64_t key_dim, bool delta);

}  // namespace trt_nvfp4::recurrent
