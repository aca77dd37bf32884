// The (token, expert) pairs sorted into work items. Bits say which tokens an expert has, so that a pair's place is a
// count of bits, the same in every run.
#pragma once

#include "exchange/sentinels.cuh"
#include "moe/moe_plan.cuh"
#include "ptx/named_barrier.cuh"

namespace trt_nvfp4 {

constexpr int kPlanThreads = TRT_NVFP4_MAX_EXPERTS;  // most of a block that sorts

namespace routing {

constexpr int kWords = 38 << 8;     // of shared memory: keys by group for each warp that routes, then the sort's tables
constexpr int kMostMaskWords = 64;  // of an expert at a time: 2048 tokens
constexpr int kEraseThreads = 64;   // that meet: who erases work items and, of one token, who writes them

// In one piece: it may be a flag.
__device__ __forceinline__ void store_item(WorkItem* place, WorkItem const& item) {
    w4a16::store_eight(place, make_uint4(item.expert, item.first, item.count, item.cost_before));
}

// Work items of one token's experts, lane r % 32 having rank r: each is one, its place how many are of lower experts.
// By a warp.
__device__ __forceinline__ void place_one_token(RouteArgs const& args, int const (&experts)[2]) {
    MoePlan const& plan = args.plan;
    int const lane = threadIdx.x % 32;
    int places[2] = {};
#pragma unroll 1
    for (int rank = 0; rank < args.top_k; ++rank) {
        int const other = __shfl_sync(0xffffffffu, rank < 32 ? experts[0] : experts[1], rank % 32);
        places[0] += other < experts[0];
        places[1] += other < experts[1];
    }
    if (args.sentinel_items > 0) ptx::sync_warps<kEraseThreads>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int const rank = lane + 32 * i, place = places[i];
        if (rank >= args.top_k) continue;
        store_item(plan.items + place, {experts[i], place, 1, place * item_cost(1)});
        plan.position[rank] = place;
        plan.order[place] = rank;
    }
    if (lane == 0) {
        w4a16::store_word(plan.item_count, args.top_k);
        *plan.total_cost = args.top_k * item_cost(1);
    }
}

// What experts have in sum.
struct Totals {
    int pairs, items, cost;

    __device__ __forceinline__ Totals operator+(Totals const& other) const {
        return {pairs + other.pairs, items + other.items, cost + other.cost};
    }
    __device__ __forceinline__ Totals operator-(Totals const& other) const {
        return {pairs - other.pairs, items - other.items, cost - other.cost};
    }
    __device__ __forceinline__ Totals of_lane(int lane) const {
        return {__shfl_sync(0xffffffffu, pairs, lane), __shfl_sync(0xffffffffu, items, lane),
                __shfl_sync(0xffffffffu, cost, lane)};
    }
};

// Totals of this lane and those before it.
__device__ __forceinline__ Totals warp_inclusive(Totals sums) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        Totals const before = sums.of_lane(lane - offset);
        if (lane >= offset) sums = sums + before;
    }
    return sums;
}

// Totals of the block's earlier threads; `all` gets those of all threads.
__device__ __forceinline__ Totals block_exclusive(Totals const& own, Totals& all) {
    __shared__ Totals sums[kPlanThreads / 32];
    int const lane = threadIdx.x % 32;
    Totals const within = warp_inclusive(own);
    if (lane == 31) sums[threadIdx.x / 32] = within;
    __syncthreads();
    Totals const warp = lane < static_cast<int>(blockDim.x) / 32 ? sums[lane] : Totals{};
    Totals const warps = warp_inclusive(warp);
    all = warps.of_lane(31);
    return (warps - warp).of_lane(threadIdx.x / 32) + (within - own);
}

// Sorts the pairs whose experts expert_of(pair) gives, and makes the work items. `memory` holds kWords; the block has a
// thread for each expert.
template <typename ExpertOf>
__device__ __forceinline__ void sort_pairs(RouteArgs const& args, uint32_t* memory, ExpertOf&& expert_of) {
    MoePlan const& plan = args.plan;
    int const threads = blockDim.x;
    int const expert = threadIdx.x;
    bool const has_expert = expert < args.experts;
    int const pairs = args.tokens * args.top_k;
    // As many tokens at a time as have bits: word w of expert e says which of tokens 32 w to 32 w + 31 chose it.
    int const words = min(min((args.tokens + 31) / 32, kMostMaskWords), kWords / (2 * args.experts));
    int const entries = words * args.experts;
    uint32_t* const masks = memory;
    int* const begins = reinterpret_cast<int*>(memory) + entries;  // the place of a word's first pair
    int* const counts = begins;                                    // before that, of an expert's pairs
    auto const mark = [&](int first) {
        int const end = min((first + words * 32) * args.top_k, pairs);
#pragma unroll 1
        for (int pair = first * args.top_k + threadIdx.x; pair < end; pair += threads) {
            int const token = pair / args.top_k - first;
            atomicOr(&masks[token / 32 * args.experts + expert_of(pair)], 1u << token % 32);
        }
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * entries; i += threads) memory[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += threads) atomicAdd(&counts[expert_of(pair)], 1);
    mark(0);
    __syncthreads();

    int const count = has_expert ? counts[expert] : 0;
    int const items = (count + args.item_tokens - 1) / args.item_tokens;
    int const full_cost = item_cost(args.item_tokens);
    int const cost = count == 0 ? 0 : (items - 1) * full_cost + item_cost(count - (items - 1) * args.item_tokens);
    Totals all;
    Totals const before = block_exclusive({count, items, cost}, all);
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
        int const done = item * args.item_tokens;
        store_item(plan.items + before.items + item,
                   {expert, before.pairs + done, min(args.item_tokens, count - done), before.cost + item * full_cost});
    }
    if (threadIdx.x == 0) {
        w4a16::store_word(plan.item_count, all.items);
        *plan.total_cost = all.cost;
    }

    int begin = before.pairs;
    for (int first = 0; first < args.tokens; first += words * 32) {
        if (first > 0) {
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < entries; i += threads) masks[i] = 0;
            __syncthreads();
            mark(first);
            __syncthreads();
        }
#pragma unroll 1
        for (int i = expert; has_expert && i < entries; i += args.experts) {
            begins[i] = begin;
            begin += __popc(masks[i]);
        }
        __syncthreads();
        int const end = min((first + words * 32) * args.top_k, pairs);
#pragma unroll 1
        for (int pair = first * args.top_k + threadIdx.x; pair < end; pair += threads) {
            int const token = pair / args.top_k - first;
            int const word = token / 32 * args.experts + expert_of(pair);
            int const position = begins[word] + __popc(masks[word] & ((1u << token % 32) - 1));
            plan.position[pair] = position;
            plan.order[position] = pair;
        }
    }
}

// See RouteArgs. By a warp, which whoever writes work items meets first.
__device__ __forceinline__ void erase_items(RouteArgs const& args) {
    int const lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < args.sentinel_items; i += 32) args.plan.items[i] = {-1, -1, -1, -1};
    if (lane == 0) {
        *args.plan.item_count = -1;
        *args.ticket = 0;
    }
    __syncwarp();
}

}  // namespace routing
}  // namespace trt_nvfp4
