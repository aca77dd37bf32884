// Decode: which part of which sequence a block reads. The blocks of a KV head, `slots` of them, go to the sequences of
// the batch by their lengths, which only the device knows: each sequence has one, the others go in proportion.
#pragma once

#include "attention/args.cuh"

namespace trt_nvfp4::attention {

struct Share {
    int batch = -1;  // none: the block has nothing to do
    int first_slot;  // of the sequence
    int splits;      // of the sequence
};

// At least so many blocks of keys for each block of threads.
constexpr int kLeastKeyBlocks = 4;

// a * b / c, rounded down, for a, b >= 0 and c > 0. A division of 64-bit integers would be a call, around which
// registers spill.
__device__ __forceinline__ int share_of(int a, int b, int64_t c) {
    int64_t const product = int64_t{a} * b;
    int quotient = static_cast<int>(static_cast<float>(product) / static_cast<float>(c));
    while (quotient * c > product) --quotient;
    while ((quotient + int64_t{1}) * c <= product) ++quotient;
    return quotient;
}

// The share of the sequence for which wanted(batch, first_slot, splits) holds. All lanes of a warp call this.
template <typename T, typename Wanted>
__device__ Share find_share(Args<T> const& args, int slots, int block_keys, Wanted wanted) {
    int const lane = threadIdx.x % 32;
    auto const blocks_of = [&](int batch) {
        return batch < args.batch ? (Sequence(args, batch).keys() + block_keys - 1) / block_keys : 0;
    };
    int64_t total = 0;
    // Loops are in the program once, here and in the kernels: code is fetched anew by every call.
#pragma unroll 1
    for (int base = 0; base < args.batch; base += 32) total += blocks_of(base + lane);
    for (int offset = 16; offset > 0; offset >>= 1) total += __shfl_xor_sync(0xffffffffu, total, offset);
    int const spare = slots - args.batch;
    int first = 0;
    Share share;
#pragma unroll 1
    for (int base = 0; base < args.batch; base += 32) {
        int const batch = base + lane, blocks = blocks_of(batch);
        int const most = (blocks + kLeastKeyBlocks - 1) / kLeastKeyBlocks;
        int const given = total > 0 ? 1 + share_of(spare, blocks, total) : 1;
        int const splits = batch >= args.batch ? 0 : most < 1 ? 1 : given < most ? given : most;
        int end = splits;
        for (int offset = 1; offset < 32; offset <<= 1) {
            int const before = __shfl_up_sync(0xffffffffu, end, offset);
            if (lane >= offset) end += before;
        }
        int const start = first + end - splits;
        uint32_t const found = __ballot_sync(0xffffffffu, batch < args.batch && wanted(batch, start, splits));
        if (found != 0) {
            int const source = __ffs(static_cast<int>(found)) - 1;
            share.batch = base + source;
            share.first_slot = __shfl_sync(0xffffffffu, start, source);
            share.splits = __shfl_sync(0xffffffffu, splits, source);
            return share;
        }
        first += __shfl_sync(0xffffffffu, end, 31);
    }
    return share;
}

}  // namespace trt_nvfp4::attention
