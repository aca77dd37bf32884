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
    int tasks_per_job;

    __host__ __device__ int chunks() const { return (k + kChunk - 1) / kChunk; }
    __host__ __device__ int tiles() const { return (rows + 127) / 128 * kTilesPerGroup; }
};

constexpr int kRouted = 0, kShared = 1;  // what jobs come in: first all routed ones, then the shared expert's

template <typename T>
struct MoeArgs {
    ExpertWeights weights[2][2];  // [phase][kRouted, kShared]
    MoeSplit split[2];            // [phase]; up is not split over blocks
    int first_phase, last_phase;  // half open
    MoePlan plan;
    int m, top_k, job_tokens, shared_jobs;
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

// Which task: its job, the shared expert's behind the routed ones, and its number among the job's.
struct TaskPlace {
    int job, part;

    __device__ __forceinline__ bool is_before(TaskPlace const& other) const {
        return job < other.job || (job == other.job && part < other.part);
    }
    __device__ __forceinline__ TaskPlace next(int tasks_per_job) const {
        return TaskPlace{job, part + 1}.carried(tasks_per_job);
    }
    // The same where a job's tasks have been counted to their end.
    __device__ __forceinline__ TaskPlace carried(int tasks_per_job) const {
        return part < tasks_per_job ? *this : TaskPlace{job + 1, 0};
    }
};

// A warp's part of a block's task: some tiles of a job by one of `splits` parts of K. Every warp goes through as many
// stages of its ring, so that a filler's rings advance together: in the last one a warp may have no chunk.
struct ExpertTask {
    int segment, job;  // the job's number within its segment
    int tile, k_group, split;
    int begin, end;  // chunks

    template <typename T>
    __device__ __forceinline__ ExpertTask(MoeArgs<T> const& args, int phase, int routed_jobs, TaskPlace place,
                                          int warp) {
        segment = place.job < routed_jobs ? kRouted : kShared;
        job = segment == kRouted ? place.job : place.job - routed_jobs;
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
__device__ __forceinline__ ExpertJob job_of(MoeArgs<T> const& args, ExpertTask const& task) {
    if (task.segment == kRouted) return args.plan.jobs[task.job];
    int const first = task.job * args.job_tokens;
    return {0, first, min(args.job_tokens, args.m - first), 0};
}

// A block's tasks of the phases, of even cost. By a whole warp. The first weight waits for all of this: hence a trip to
// L2 for all four places at a time, and nothing in 64 bits (see serves()).
struct TaskRanges {
    int routed_jobs;
    TaskPlace begin[2], end[2];  // [phase]

    TaskRanges() = default;

    template <typename T>
    __device__ __forceinline__ explicit TaskRanges(MoeArgs<T> const& args) : routed_jobs(*args.plan.job_count) {
        int const jobs_cost = *args.plan.total_cost;
        int shared_cost = 0;
#pragma unroll 1
        for (int job = 0; job < args.shared_jobs; ++job) shared_cost += job_cost(shared_count(args, job));
        int targets[4];
        unsigned begun[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const all = jobs_cost * args.weights[i / 2][kRouted].tasks_per_job +
                            shared_cost * args.weights[i / 2][kShared].tasks_per_job;
            unsigned const block = blockIdx.x + i % 2;
            float const share = __fdividef(static_cast<float>(block), static_cast<float>(gridDim.x));
            targets[i] = block < gridDim.x ? static_cast<int>(static_cast<float>(all) * share) : all;
        }
#pragma unroll 1
        for (int job = threadIdx.x % 32; job < routed_jobs; job += 32) {
            int const before = args.plan.jobs[job].cost_before;
#pragma unroll
            for (int i = 0; i < 4; ++i) begun[i] += before * args.weights[i / 2][kRouted].tasks_per_job <= targets[i];
        }
        ExpertJob jobs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            begun[i] = __reduce_add_sync(0xffffffffu, begun[i]) - 1;
            jobs[i] = args.plan.jobs[begun[i]];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const per_job = args.weights[i / 2][kRouted].tasks_per_job;
            TaskPlace& place = (i % 2 == 0 ? begin : end)[i / 2];
            place.job = static_cast<int>(begun[i]);
            place.part = tasks_of(jobs[i].count, targets[i] - jobs[i].cost_before * per_job);
            place = place.carried(per_job);
            int const into_shared = targets[i] - jobs_cost * per_job;
            if (into_shared >= 0) place = shared_place(args, i / 2, routed_jobs, into_shared);
        }
    }

 private:
    template <typename T>
    static __device__ __forceinline__ int shared_count(MoeArgs<T> const& args, int job) {
        return min(args.job_tokens, args.m - job * args.job_tokens);
    }

    // Tasks of a job of `count` pairs that begin before `cost`.
    static __device__ __forceinline__ int tasks_of(int count, int cost) {
        unsigned const each = job_cost(count);
        return static_cast<int>((static_cast<unsigned>(cost) + each - 1) / each);
    }

    template <typename T>
    static __device__ __noinline__ TaskPlace shared_place(MoeArgs<T> const& args, int phase, int routed_jobs,
                                                          int cost) {
        int const per_job = args.weights[phase][kShared].tasks_per_job;
        for (int job = 0; job < args.shared_jobs; ++job) {
            int const all = per_job * job_cost(shared_count(args, job));
            if (cost < all) {
                return TaskPlace{routed_jobs + job, tasks_of(shared_count(args, job), cost)}.carried(per_job);
            }
            cost -= all;
        }
        return {routed_jobs + args.shared_jobs, 0};
    }
};

// A block's weights of all phases, by one warp, for some of the warps that multiply.
template <int kMostColumns, typename T>
__device__ __forceinline__ void fill_experts(MoeArgs<T> const& args, TaskRanges const& ranges, int filler,
                                             Rings<kMoeWarps<kMostColumns>> const& rings) {
    constexpr int kTiles = kMoeWarps<kMostColumns> / kMoeFillers<kMostColumns>;
    constexpr int kInFlight = kMoeStagesInFlight<kMostColumns> / kMoeFillers<kMostColumns>;
    int const first = uniform(filler) * kTiles;
    RingPosition at;
#pragma unroll 1
    for (int phase = args.first_phase; phase < min(args.last_phase, static_cast<int>(kSumPhase)); ++phase) {
        int const k_groups = args.split[phase].k_groups;
#pragma unroll 1
        for (TaskPlace place = ranges.begin[phase]; place.is_before(ranges.end[phase]);) {
            ExpertTask const first_task(args, phase, ranges.routed_jobs, place, first);
            ExpertWeights const& w = args.weights[phase][first_task.segment];
            int64_t const expert = job_of(args, first_task).expert;
            uint8_t const* const codes = w.codes + expert * w.rows * (w.k / 2);
            uint8_t const* const scales = w.scales + expert * scale_bytes(w.rows, w.k);
            TileCopies tiles[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                ExpertTask const task(args, phase, ranges.routed_jobs, place, first + i);
                int const begin = task.tile < w.tiles() ? task.begin + task.k_group : task.end;
                tiles[i] = TileCopies({codes, scales, w.rows, w.k, task.tile, begin, task.end, k_groups});
            }
            int const steps = (first_task.end - first_task.begin + k_groups - 1) >> (__ffs(k_groups) - 1);
            fill<kInFlight>(rings, at, first, tiles, steps);
            place = place.next(w.tasks_per_job);
        }
    }
}

}  // namespace trt_nvfp4::w4a16
