// First phase of the decoder's attention: sequences are split over blocks, and a block finds its work item.
#pragma once

#include "decoder/attention/layout.cuh"

namespace trt_nvfp4::decoder {

// By the first warp, once.
template <int kKeys, typename T>
__device__ __forceinline__ void share_slots(DecoderArgs<T> const& args, AttentionShared& own) {
    attention::Args<T> const& call = args.attention;
    int const batch = threadIdx.x;
    bool const inside = batch < call.batch;
    attention::Sequence const sequence(call, inside ? batch : 0);
    int const blocks = inside ? (sequence.keys() + kKeys - 1) / kKeys : 0;
    int total = blocks;
    for (int offset = 16; offset > 0; offset >>= 1) total += __shfl_xor_sync(0xffffffffu, total, offset);
    int const most = (blocks + attention::kLeastKeyBlocks - 1) / attention::kLeastKeyBlocks;
    int const given = total > 0 ? 1 + attention::share_of(args.slots - call.batch, blocks, total) : 1;
    int const splits = inside ? max(min(given, most), 1) : 0;
    int end = splits;
    for (int offset = 1; offset < 32; offset <<= 1) {
        int const before = __shfl_up_sync(0xffffffffu, end, offset);
        if (static_cast<int>(threadIdx.x) >= offset) end += before;
    }
    if (inside) own.sequences[batch] = {sequence.past, sequence.first, sequence.length, end - splits, splits};
    if (threadIdx.x == 0) own.item.index = -1;
}

// By one thread. A block's only work item is the same for all layers.
template <int kKeys, int kBytes, typename T>
__device__ __forceinline__ void find_item(DecoderArgs<T> const& args, int index, int layer, AttentionShared& own) {
    attention::Args<T> const& call = args.attention;
    AttentionItem& item = own.item;
    if (item.index == index) {
        item.layer = layer;
        if (item.batch >= 0) item.keys += 2 * args.cache_bytes;
        return;
    }
    item.layer = layer;
    item.index = index;
    item.pair = index / args.slots;
    item.slot = index % args.slots;
    item.batch = -1;
    for (int batch = 0; batch < call.batch; ++batch) {
        int const split = item.slot - own.sequences[batch].first_slot;
        if (split >= 0 && split < own.sequences[batch].splits) item.batch = batch;
    }
    if (item.batch < 0) return;
    SharedSequence const sequence = own.sequences[item.batch];
    item.splits = sequence.splits;
    item.kv_head = item.pair / args.chunks();
    item.row0 = item.pair % args.chunks() * kRows;
    item.rows = min(call.rows() - item.row0, kRows);
    int const key_blocks = (max(sequence.length - sequence.first, 0) + kKeys - 1) / kKeys;
    auto const border = [&](int split) {
        int const block = attention::share_of(key_blocks, split, sequence.splits);
        return min(sequence.first + block * kKeys, sequence.length);
    };
    item.keys =
        args.keys_of(layer) + attention::cache_row(call, item.batch, item.kv_head, 0) * (call.head_dim * kBytes);
    item.past = sequence.past;
    item.begin = border(item.slot - sequence.first_slot);
    item.end = border(item.slot - sequence.first_slot + 1);
    item.seen_by_all = min(item.end, item.past + item.token_of(args, 0) + 1);
    item.first_new = max(item.begin, item.past);
    item.new_tokens = max(item.end - item.first_new, 0);
}

}  // namespace trt_nvfp4::decoder
