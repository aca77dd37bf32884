// A mixture of experts as a list of tasks, which blocks take one after another as they get to them: first all of gate
// and up, then all of down. A task needs no later one, so that whoever has taken a task can finish it however many
// blocks run at once.
#pragma once

#include "common/divisor.h"
#include "heuristics/sm90_moe.h"
#include "moe/moe_plan.cuh"
#include "w4a16/sm90/sm90_w4a16_mlp_rows.cuh"
#include "w4a16/sm90/sm90_w4a16_task.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kUp = 0, kDown = 1, kNoPhase = 2;
constexpr int kRouted = 0, kShared = 1;  // experts, the second being the one that all tokens go to

constexpr int kCountersOfLine = 32;

// Counters of a job: one for each chunk of hidden values, in whole lines.
__host__ __device__ constexpr int chunk_counters(int k) {
    return (chunks_of(k) + kCountersOfLine - 1) / kCountersOfLine * kCountersOfLine;
}

template <typename T>
struct MixtureArgs {
    Projection<T> matrices[2][2];  // [kUp, kDown][kRouted, kShared]: layers are experts
    MoePlan plan;
    int m, top_k, shared_jobs;
    bool scale_input;
    int job_tokens;              // the most pairs of a job
    bool hidden_is_flags;        // absent until it is written (sm80_w4a16_exchange.cuh), instead of counted in `done`
    T const* x;                  // [m, hidden]
    float* outputs[2];           // [splits of down, pairs in sorted order or tokens, hidden]
    uint32_t* ticket;            // the next task
    uint32_t* done[2];           // [jobs, chunk_counters()]: tiles of up that a chunk of hidden values lies in
    int counters;                // of both segments
    uint32_t* greatest;          // [m] magnitude of a token's x (magnitude_bits), and
    float* factors[2];           // [columns_of_jobs(), 8] of tokens, where wide jobs' x becomes FP16
    uint4* parts;                // [part_units]: of even shares PartSums, absent until they are written
    int part_units;              // of all shares
    uint32_t one;                // 1, see shift_left
    Divisor tasks_of_job[2][2];  // as `matrices`
    Divisor splits[2];           // [kUp, kDown]
    Divisor chunks, blocks;      // of a tile of up; of the launch

    __device__ __forceinline__ uint32_t* done_of(int segment, int job) const {
        return done[segment] + job * chunk_counters(matrices[kDown][segment].k);
    }
};

// Columns that a job's tokens take, eight each.
__host__ __device__ constexpr int job_columns(int count) { return (count + 7) / 8; }

// Of a wide job. Places follow from jobs' first pairs alone.
__host__ __device__ constexpr int64_t first_column(int job, int first) { return first / 8 + job; }
__host__ __device__ constexpr int64_t columns_of_jobs(int64_t rows, int64_t jobs) { return rows / 8 + jobs; }

// How activations lie in memory: row after row, chunk after chunk what a panel has of it (RowPanel).
template <typename T>
class RowImage {
 public:
    static __host__ __device__ int64_t row_bytes(int k) { return int64_t{chunks_of(k)} * kRowBytes; }

    __device__ __forceinline__ RowImage(uint8_t const* images, int k)
        : data_(const_cast<uint8_t*>(images)), pitch_(row_bytes(k)) {}

    __device__ __forceinline__ uint8_t* chunk(int which, int row) const {
        return data_ + row * pitch_ + static_cast<int64_t>(which) * kRowBytes;
    }
    // Of the values from which * kRowFactorK on. All of what lies behind a chunk is written, also where it is not read.
    __device__ __forceinline__ void set_factor(int which, int row, float factor) const {
        uint8_t* const place = chunk(which / kFactors, row) + RowPanel<true>::factor_offset(which % kFactors);
        w4a16::store_four(place, {__float_as_uint(factor), 0u});
    }
    // Eight values.
    __device__ __forceinline__ uint4* unit(int which, int row) const {
        return reinterpret_cast<uint4*>(chunk(which / kUnits, row)) + which % kUnits;
    }

 private:
    static constexpr int kFactors = kChunk / kRowFactorK, kUnits = kChunk / 8;

    uint8_t* const data_;
    int64_t const pitch_;
};

// The plan is in the making while tasks are taken: its jobs are flags (RouteArgs).
constexpr int kPollNanoseconds = 20;
__device__ __forceinline__ int await_job_count(MoePlan const& plan) {
    uint32_t count;
    while ((count = w4a16::load_word(plan.job_count)) == ~0u) __nanosleep(kPollNanoseconds);
    return static_cast<int>(count);
}
__device__ __forceinline__ ExpertJob await_job(MoePlan const& plan, int which) {
    uint4 job;
    while (w4a16::has_absent(job = w4a16::load_eight(plan.jobs + which))) __nanosleep(kPollNanoseconds);
    return {static_cast<int>(job.x), static_cast<int>(job.y), static_cast<int>(job.z), static_cast<int>(job.w)};
}

// A tile of a job's projection by some chunks of K.
struct MixtureTask {
    int phase, segment, job;  // the job's number within its segment
    int expert, first, count;
    int tile, split, begin, end;
    int columns[kWarpgroups];  // that a warpgroup multiplies: none where it has no rows
    float* outputs;            // of down: the first token's
    int share, first_share;    // of gate and up: this one, and its tile's first: the last adds those before it

    // The task that `number` stands for, of those from phase `from` on.
    template <typename T>
    __device__ __forceinline__ MixtureTask(MixtureArgs<T> const& args, int routed_jobs, int from, int number)
        : phase(kNoPhase), share(0), first_share(0) {
#pragma unroll 1
        for (int i = 2 * from; i < 4; ++i) {
            Projection<T> const& matrix = args.matrices[i / 2][1 - i % 2];
            int const jobs = i % 2 == 0 ? args.shared_jobs : routed_jobs;
            int const of_job = tiles_of(matrix.rows) * matrix.split.splits;
            if (number >= jobs * of_job) {
                number -= jobs * of_job;
                continue;
            }
            phase = i / 2;
            segment = 1 - i % 2;
            job = args.tasks_of_job[phase][segment].of(number);
            int const part = number - job * of_job, chunks = chunks_of(matrix.k);
            Divisor const splits = args.splits[phase];
            tile = splits.of(part);
            split = part - tile * matrix.split.splits;
            begin = splits.of(split * chunks);
            end = splits.of((split + 1) * chunks);
            expert = 0;
            if (segment == kRouted && args.m == 1) {
                first = job;
                count = 1;
            } else if (segment == kRouted) {
                ExpertJob const routed = await_job(args.plan, job);
                expert = routed.expert;
                first = routed.first;
                count = routed.count;
            } else {
                first = job * args.job_tokens;
                count = min(args.job_tokens, args.m - first);
            }
            for (int i = 0; i < kWarpgroups; ++i) {
                columns[i] = tile * kTileRows + i * kGroupRows < matrix.rows ? job_columns(count) : 0;
            }
            int64_t const rows = segment == kRouted ? int64_t{args.m} * args.top_k : args.m;
            outputs = args.outputs[segment] + (split * rows + first) * matrix.rows;
            break;
        }
    }
    MixtureTask() = default;

    // Of one token, whose experts have a job each: all else is known before.
    __device__ __forceinline__ void await_expert(MoePlan const& plan) {
        if (segment == kRouted) expert = await_job(plan, job).expert;
    }

    // Whether another share adds what this one yields.
    template <typename T>
    __device__ __forceinline__ bool is_part(MixtureArgs<T> const& args) const {
        return phase == kUp && end < chunks_of(args.matrices[kUp][segment].k);
    }
};

constexpr int kAhead = 3;  // chunks of weights still to fetch when the next task is taken
constexpr int kQueue = 8;  // short tasks: weights of several are on their way at once

struct TaskQueue {
    MixtureTask tasks[kQueue];
    uint64_t full[kQueue];
    uint64_t stored[kQueue];  // by the threads that multiply: what a task yields
    uint64_t empty[kQueue];
    uint64_t ending;  // by the thread that fetches weights: the last task that was put in has few more

    // By one thread, before anything else.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kQueue; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&stored[i]), 32 * kWarps);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), 1);
        }
        ptx::mbarrier_init(ptx::shared_address(&ending), 1);
    }

    // Calls f(task, place) for the tasks of this block.
    template <typename F>
    __device__ __forceinline__ void each(F&& f) {
        w4a16::RingPosition place;
#pragma unroll 1
        while (true) {
            ptx::mbarrier_wait(ptx::shared_address(&full[place.stage]), place.round);
            MixtureTask const& task = tasks[place.stage];
            if (task.phase == kNoPhase) break;
            f(task, place);
            place.advance(kQueue);
        }
    }
};

}  // namespace trt_nvfp4::sm90
