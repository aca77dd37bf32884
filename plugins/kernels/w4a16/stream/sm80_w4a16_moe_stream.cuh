// The stream of weights of a mixture of experts: which tasks a block has, and the warps that fill the rings with their
// weights, ahead of those that multiply.
#pragma once

#include "heuristics/moe.h"
#include "moe/moe_plan.cuh"
#include "w4a16/stream/sm80_w4a16_ring.cuh"

namespace trt_nvfp4::w4a16 {

enum MoePhase { kUpPhase = 0, kDownPhase = 1, kSumPhase = 2, kMoePhases = 3 };

// One projection of all routed experts, or of the shared one.
struct ExpertWeights {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    void const* bias;
    int rows, k;
    int tasks_per_item;

    __host__ __device__ int chunks() const { return (k + kChunk - 1) / kChunk; }
    __host__ __device__ int tiles() const { return (rows + 127) / 128 * kTilesPerGroup; }
};

constexpr int kRouted = 0, kShared = 1;  // what work items come in: first all routed ones, then the shared expert's

template <typename T>
struct MoeArgs {
    ExpertWeights weights[2][2];  // [phase][kRouted, kShared]
    MoeSplit split[2];            // [phase]; up is not split over blocks
    int first_phase, last_phase;  // half open
    MoePlan plan;
    int m, top_k, item_tokens, shared_items;
    int warps;  // of a block, that multiply
    bool scale_input;
    TrtNvfp4Activation activation;
    bool gated;
    float alpha, limit;
    T const* x;
    T* y;
    T* hidden[2];       // [pairs in sorted order, k of down], [m, k of the shared down]
    float* outputs[2];  // [splits, pairs in sorted order, hidden], [splits, m, hidden]
    MoeMemory memory;
    uint32_t one;  // 1, see shift_left
};

// Which task: its work item, the shared expert's behind the routed ones, and its number among the work item's.
struct TaskPlace {
    int item, part;

    __device__ __forceinline__ bool is_before(TaskPlace const& other) const {
        return item < other.item || (item == other.item && part < other.part);
    }
    __device__ __forceinline__ TaskPlace next(int tasks_per_item) const {
        return TaskPlace{item, part + 1}.carried(tasks_per_item);
    }
    // The same where a work item's tasks have been counted to their end.
    __device__ __forceinline__ TaskPlace carried(int tasks_per_item) const {
        return part < tasks_per_item ? *this : TaskPlace{item + 1, 0};
    }
};

// A warp's part of a block's task: some tiles of a work item by one of `splits` parts of K. Every warp goes through as
// many stages of its ring, so that a producer warp's rings advance together: in the last one a warp may have no chunk.
struct ExpertTask {
    int segment, item;  // the work item's number within its segment
    int tile, k_group, split;
    int begin, end;  // chunks

    template <typename T>
    __device__ __forceinline__ ExpertTask(MoeArgs<T> const& args, int phase, int routed_items, TaskPlace place,
                                          int warp) {
        segment = place.item < routed_items ? kRouted : kShared;
        item = segment == kRouted ? place.item : place.item - routed_items;
        // Powers of two: a division is twenty instructions.
        MoeSplit const& way = args.split[phase];
        int const k_bits = __ffs(way.k_groups) - 1;
        int const split_bits = __ffs(way.splits) - 1;
        int const chunks = args.weights[phase][segment].chunks();
        split = place.part & (way.splits - 1);
        tile = ((place.part >> split_bits) * args.warps + warp) >> k_bits;
        k_group = warp & (way.k_groups - 1);
        begin = (split * chunks) >> split_bits;
        end = ((split + 1) * chunks) >> split_bits;
    }

    __device__ __forceinline__ bool last_stage_is_empty(int k_groups) const {
        return k_group > ((end - begin - 1) & (k_groups - 1));
    }
};

template <typename T>
__device__ __forceinline__ WorkItem item_of(MoeArgs<T> const& args, ExpertTask const& task) {
    if (task.segment == kRouted) return args.plan.items[task.item];
    int const first = task.item * args.item_tokens;
    return {0, first, min(args.item_tokens, args.m - first), 0};
}

// A block's tasks of the phases, of even cost. By a whole warp. The first weight waits for all of this: hence a trip to
// L2 for all four places at a time, and nothing in 64 bits (see serves()).
struct TaskRanges {
    int routed_items;
    TaskPlace begin[2], end[2];  // [phase]

    TaskRanges() = default;

    template <typename T>
    __device__ __forceinline__ explicit TaskRanges(MoeArgs<T> const& args) : routed_items(*args.plan.item_count) {
        int const items_cost = *args.plan.total_cost;
        int shared_cost = 0;
#pragma unroll 1
        for (int item = 0; item < args.shared_items; ++item) shared_cost += item_cost(shared_count(args, item));
        int targets[4];
        unsigned begun[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const all = items_cost * args.weights[i / 2][kRouted].tasks_per_item +
                            shared_cost * args.weights[i / 2][kShared].tasks_per_item;
            unsigned const block = blockIdx.x + i % 2;
            float const share = __fdividef(static_cast<float>(block), static_cast<float>(gridDim.x));
            targets[i] = block < gridDim.x ? static_cast<int>(static_cast<float>(all) * share) : all;
        }
#pragma unroll 1
        for (int item = threadIdx.x % 32; item < routed_items; item += 32) {
            int const before = args.plan.items[item].cost_before;
#pragma unroll
            for (int i = 0; i < 4; ++i) begun[i] += before * args.weights[i / 2][kRouted].tasks_per_item <= targets[i];
        }
        WorkItem items[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            begun[i] = __reduce_add_sync(0xffffffffu, begun[i]) - 1;
            items[i] = args.plan.items[begun[i]];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const per_item = args.weights[i / 2][kRouted].tasks_per_item;
            TaskPlace& place = (i % 2 == 0 ? begin : end)[i / 2];
            place.item = static_cast<int>(begun[i]);
            place.part = tasks_of(items[i].count, targets[i] - items[i].cost_before * per_item);
            place = place.carried(per_item);
            int const into_shared = targets[i] - items_cost * per_item;
            if (into_shared >= 0) place = shared_place(args, i / 2, routed_items, into_shared);
        }
    }

 private:
    template <typename T>
    static __device__ __forceinline__ int shared_count(MoeArgs<T> const& args, int item) {
        return min(args.item_tokens, args.m - item * args.item_tokens);
    }

    // Tasks of a work item of `count` pairs that begin before `cost`.
    static __device__ __forceinline__ int tasks_of(int count, int cost) {
        unsigned const each = item_cost(count);
        return static_cast<int>((static_cast<unsigned>(cost) + each - 1) / each);
    }

    template <typename T>
    static __device__ __noinline__ TaskPlace shared_place(MoeArgs<T> const& args, int phase, int routed_items,
                                                          int cost) {
        int const per_item = args.weights[phase][kShared].tasks_per_item;
        for (int item = 0; item < args.shared_items; ++item) {
            int const all = per_item * item_cost(shared_count(args, item));
            if (cost < all) {
                return TaskPlace{routed_items + item, tasks_of(shared_count(args, item), cost)}.carried(per_item);
            }
            cost -= all;
        }
        return {routed_items + args.shared_items, 0};
    }
};

// A block's weights of all phases, by one warp, for some of the consumer warps.
template <int kMostColumns, typename T>
__device__ __forceinline__ void produce_experts(MoeArgs<T> const& args, TaskRanges const& ranges, int producer,
                                                Rings<kMoeWarps<kMostColumns>> const& rings) {
    constexpr int kTiles = kMoeWarps<kMostColumns> / kMoeProducers<kMostColumns>;
    constexpr int kInFlight = kMoeStagesInFlight<kMostColumns> / kMoeProducers<kMostColumns>;
    int const first = uniform(producer) * kTiles;
    RingPosition at;
#pragma unroll 1
    for (int phase = args.first_phase; phase < min(args.last_phase, static_cast<int>(kSumPhase)); ++phase) {
        int const k_groups = args.split[phase].k_groups;
#pragma unroll 1
        for (TaskPlace place = ranges.begin[phase]; place.is_before(ranges.end[phase]);) {
            ExpertTask const first_task(args, phase, ranges.routed_items, place, first);
            ExpertWeights const& w = args.weights[phase][first_task.segment];
            int64_t const expert = item_of(args, first_task).expert;
            uint8_t const* const codes = w.codes + expert * w.rows * (w.k / 2);
            uint8_t const* const scales = w.scales + expert * scale_bytes(w.rows, w.k);
            TileCopies tiles[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                ExpertTask const task(args, phase, ranges.routed_items, place, first + i);
                int const begin = task.tile < w.tiles() ? task.begin + task.k_group : task.end;
                tiles[i] = TileCopies({codes, scales, w.rows, w.k, task.tile, begin, task.end, k_groups});
            }
            int const steps = (first_task.end - first_task.begin + k_groups - 1) >> (__ffs(k_groups) - 1);
            fill<kInFlight>(rings, at, first, tiles, steps);
            place = place.next(w.tasks_per_item);
        }
    }
}

}  // namespace trt_nvfp4::w4a16
