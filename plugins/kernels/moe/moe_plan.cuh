// Which experts each token goes to and with what weight, and the (token, expert) pairs sorted by expert and cut into
// work items: what moe_routing.cuh makes of the router's logits, and all kernels of NVFP4MoE start from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api/trt_nvfp4.h"

namespace trt_nvfp4 {

// A run of pairs in sorted order that go to one expert.
struct __align__(16) WorkItem {
    int expert, first, count;
    int cost_before;  // of the work items before this one, see item_cost
};

// What a task of a work item of `count` pairs takes, in quarters of the time that its weights take to arrive: columns
// are multiplied, and their activations staged, in eights, doubled up (an estimate).
__host__ __device__ constexpr int item_cost(int count) { return count <= 8 ? 5 : count <= 16 ? 6 : 9; }

// Pair p = token * top_k + rank. Sorted order: by expert, then by token.
struct MoePlan {
    int* experts;          // [pairs]
    float* weights;        // [pairs]
    int* position;         // [pairs] of a pair in sorted order
    int* order;            // [pairs] the pair at a position
    float* shared_factor;  // [tokens] of the shared expert's output
    WorkItem* items;       // [most_items]
    int* item_count;       // [1]
    int* total_cost;       // [1] of all work items
};

// Work items that any routing of `pairs` pairs may make.
inline int64_t most_items(int64_t pairs, int64_t experts, int64_t item_tokens) {
    return std::min(pairs, experts + pairs / item_tokens);
}

// One of a token's terms: a part of K of a rank's output, the shared expert's being behind the last.
struct MoeTerm {
    int rank, split;
};

// What tokens' outputs are the sums of.
struct MoeTerms {
    MoePlan plan;
    float const* outputs;  // [splits, pairs in sorted order, width]
    float const* shared;   // [splits, tokens, width]; null: no shared expert
    int splits, tokens, top_k, width;
    bool scale_input;  // weights are in x already

    __device__ __forceinline__ int ranks() const { return shared == nullptr ? top_k : top_k + 1; }

    // No division: that is twenty instructions.
    __device__ __forceinline__ MoeTerm later(MoeTerm term, int by) const {
        for (term.split += by; term.split >= splits; term.split -= splits) ++term.rank;
        return term;
    }

    // The row of a term, and what it is multiplied by. Behind the last term that of a last one.
    __device__ __forceinline__ float const* row(int token, MoeTerm term, float& factor) const {
        int const rank = min(term.rank, ranks() - 1);
        bool const routed = rank < top_k;
        int const pair = token * top_k + rank;
        float const weight = *(routed ? plan.weights + pair : plan.shared_factor + token);
        factor = routed && scale_input ? 1.0f : weight;
        int const row = routed ? plan.position[pair] : token;
        // Several splits are of so few tokens that 32 bits suffice.
        int const rows = routed ? tokens * top_k : tokens;
        return (routed ? outputs : shared) + int64_t{term.split * rows + row} * width;
    }
};

struct RouteArgs {
    TrtNvfp4Scoring scoring;
    bool renormalize;
    int tokens, experts, hidden, top_k, groups, open_groups, group_score_top;
    float scaling_factor;
    float const* logits;           // [tokens, experts]
    float const* correction_bias;  // [experts]
    void const* x;                 // T [tokens, hidden], and
    void const* shared_gate;       // T [hidden]: null where the shared expert has no gate
    MoePlan plan;
    int item_tokens;         // most pairs of a work item
    void* sentinel;          // erased to 0xff, 16-byte aligned
    int64_t sentinel_bytes;  // bytes, a multiple of 16
    // Where a later kernel takes work items as they are made, not at this one's end: the first so many of them, and
    // their number, are sentinels (exchange/sentinels.cuh) before that kernel may start.
    int sentinel_items;
    uint32_t* ticket;  // zero by then
};

}  // namespace trt_nvfp4
