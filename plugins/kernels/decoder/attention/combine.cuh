// Last phase: all blocks add up the partial sums of split sequences.
#pragma once

#include "decoder/attention/layout.cuh"

namespace trt_nvfp4::decoder {

// Adds the partial sums of split sequences: eight dimensions of a row per warp. Each of its four groups of lanes takes
// every fourth split, so that few trips to L2 follow one another; then the groups' sums are added, in order.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void combine(DecoderArgs<T> const& args, int layer, AttentionShared const& own) {
    attention::Args<T> const& call = args.attention;  // of layer 0: for its sizes
    constexpr int kAtOnce = 4, kGroups = 4, kDims = 8;
    int const lane = threadIdx.x % 32, group = lane / kDims;
    int const of_row = call.head_dim / kDims;
    int const units = args.m * call.heads * of_row;
#pragma unroll 1
    for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < units; unit += w4a16::kWarps * gridDim.x) {
        int const query = args.by_eights.of(unit), i = (unit - query * of_row) * kDims + lane % kDims;
        int const token = args.by_heads.of(query), head = query - token * call.heads;
        int const batch = args.by_sequence.of(token);
        SharedSequence const& share = own.sequences[batch];
        if (share.splits == 1) continue;  // the block that had it published the output
        int const kv_head = args.by_group.of(head);
        int const row = (token - batch * call.tokens) * call.group + head - kv_head * call.group;
        int const pair = kv_head * args.chunks() + row / kRows;
        float largest = -INFINITY, weight = 0.0f, sum = 0.0f;
#pragma unroll 1
        for (int first = 0; first < share.splits; first += kGroups * kAtOnce) {
            w4a16::Partial parts[3 * kAtOnce];
            auto const load = [&](int j, bool wanted) {
                int const split = first + j / 3 * kGroups + group;
                int64_t const place = args.place(pair, share.first_slot + split, row % kRows);
                w4a16::load_partial_if(
                    wanted,
                    j % 3 == 0 ? args.sums + place * call.head_dim + i : args.softmaxes + place * 2 + (j % 3 - 1),
                    parts[j]);
            };
#pragma unroll
            for (int j = 0; j < 3 * kAtOnce; ++j) {
                parts[j] = {j % 3 == 1 ? -INFINITY : 0.0f, layer};
                load(j, first + j / 3 * kGroups + group < share.splits);
            }
            w4a16::await_all<3 * kAtOnce>([&](int j) { return parts[j].phase != layer; }, load);
            __syncwarp();
            float top = largest;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, parts[3 * j + 1].value);
            float const base = top == -INFINITY ? 0.0f : top;
            float const shrink = ptx::exp2(largest - base);
            largest = top;
            weight *= shrink;
            sum *= shrink;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                float const part = ptx::exp2(parts[3 * j + 1].value - base);
                weight += parts[3 * j + 2].value * part;
                sum += parts[3 * j].value * part;
            }
        }
#pragma unroll
        for (int bit = kDims; bit < 32; bit *= 2) {
            float const other = __shfl_xor_sync(0xffffffffu, largest, bit);
            float const top = fmaxf(largest, other), base = top == -INFINITY ? 0.0f : top;
            float const own_part = ptx::exp2(largest - base), others = ptx::exp2(other - base);
            weight = weight * own_part + __shfl_xor_sync(0xffffffffu, weight, bit) * others;
            sum = sum * own_part + __shfl_xor_sync(0xffffffffu, sum, bit) * others;
            largest = top;
        }
        if (group != 0) continue;
        attention::Finish<T, kFp8> const finish(args.attention_of(layer), head, largest, weight);
        w4a16::store_tagged(args.attended + query * call.head_dim + i, ptx::from_float<T>(sum * finish.factor), layer);
    }
}

}  // namespace trt_nvfp4::decoder
