// Attention between two projections of a launch: as sm80_attention_decode.cuh, but queries, keys and values of new
// tokens come as words from other blocks, while the first old keys and the next projection's weights are in flight.
//
// A work item (Job) is up to 8 rows of a KV head by a part of one sequence's keys. Its block goes through the phases in
// attention/: it stages the new rows, appends keys and values (blocks that share a KV head write the same), and leaves
// partial sums, which all blocks then combine.
#pragma once

#include "decoder/attention/combine.cuh"
#include "decoder/attention/keys.cuh"
#include "decoder/attention/share_keys.cuh"

namespace trt_nvfp4::decoder {

template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void attend(DecoderArgs<T> const& args, int layer, uint8_t* shared, AttentionShared& own) {
    int const items = args.attention.kv_heads * args.chunks() * args.slots;
#pragma unroll 1
    for (int index = blockIdx.x; index < items;) {
        w4a16::sync_warps();  // others may still read what is here
        if (threadIdx.x == 0) find_item<Attend<T, kFp8, kHeadDim>::kKeys, kFp8 ? 1 : 2>(args, index, layer, own);
        w4a16::sync_warps();
        if (own.item.batch >= 0) attend_item<T, kFp8, kHeadDim>(args, own.item, shared, own.softmaxes);
        index = own.item.index + gridDim.x;
    }
    combine<T, kFp8, kHeadDim>(args, layer, own);
}

}  // namespace trt_nvfp4::decoder
