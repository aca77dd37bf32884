// Fourth phase: a block adds up its warps' sums, and publishes them: as the output where no other block has keys of the
// sequence, else as partial sums.
#pragma once

#include "decoder/attention/layout.cuh"

namespace trt_nvfp4::decoder {

// Adds up what the warps have, and publishes it: divided where no other work item has keys of the sequence.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void finish_item(DecoderArgs<T> const& args, AttentionItem const& item, uint8_t const* tiles,
                                            Softmaxes& softmaxes) {
    using Config = Attend<T, kFp8, kHeadDim>;
    attention::Args<T> const& call = args.attention;
    int const warps = args.attention_warps / Config::kParts;  // each with its partners
    // A row's factor for each warp, and the row's maximum and weight.
    __shared__ float2 rows[kRows];
    if (threadIdx.x < kRows) {
        float largest = -INFINITY, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            if (w < warps) largest = fmaxf(largest, softmaxes[w][threadIdx.x].x);
        }
        float const base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            float2& softmax = softmaxes[w][threadIdx.x];
            if (w >= warps) continue;
            softmax.x = ptx::exp2(softmax.x - base);
            weight += softmax.y * softmax.x;
        }
        rows[threadIdx.x] = make_float2(largest, weight);
    }
    w4a16::sync_warps();
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < item.rows * Config::kLaneDims; unit += w4a16::kWarps) {
        int const row = unit / Config::kLaneDims, i = unit % Config::kLaneDims * 32 + threadIdx.x % 32;
        float const* const values = reinterpret_cast<float const*>(tiles + i / Config::kDims * Config::kWarpBytes) +
                                    row * Config::kSumPitch + i % Config::kDims;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            if (w < warps) sum = fmaf(values[w * (Config::kParts * Config::kWarpBytes / 4)], softmaxes[w][row].x, sum);
        }
        if (i >= call.head_dim) continue;
        float2 const of_row = rows[row];
        if (item.splits == 1) {
            int const head = item.head_of(args, row);
            attention::Finish<T, kFp8> const finish(args.attention_of(item.layer), head, of_row.x, of_row.y);
            int const token = item.batch * call.tokens + item.token_of(args, row);
            w4a16::store_tagged(args.attended + (token * call.heads + head) * call.head_dim + i,
                                ptx::from_float<T>(sum * finish.factor), item.layer);
        } else {
            int64_t const place = args.place(item.pair, item.slot, row);
            w4a16::store_partial(args.sums + place * call.head_dim + i, sum, item.layer);
            if (i < 2) w4a16::store_partial(args.softmaxes + place * 2 + i, i == 0 ? of_row.x : of_row.y, item.layer);
        }
    }
}

}  // namespace trt_nvfp4::decoder
