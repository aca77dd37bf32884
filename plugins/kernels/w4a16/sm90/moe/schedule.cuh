// A mixture of experts as a list of tasks, which blocks take one after another as they get to them: first all of gate
// and up, then all of down. A task needs no later one, so that whoever has taken a task can finish it however many
// blocks run at once.
#pragma once

#include "common/divisor.h"
#include "heuristics/sm90_moe.h"
#include "moe/moe_plan.cuh"
#include "ptx/prefetch.cuh"
#include "w4a16/sm90/common/task.cuh"
#include "w4a16/sm90/mlp/rows.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kUp = 0, kDown = 1, kNoPhase = 2;
constexpr int kRouted = 0, kShared = 1;  // experts, the second being the one that all tokens go to

constexpr int kCountersOfLine = 32;

// Counters of a work item: one for each chunk of hidden values, in whole lines.
__host__ __device__ constexpr int chunk_counters(int k) {
    return (chunks_of(k) + kCountersOfLine - 1) / kCountersOfLine * kCountersOfLine;
}

template <typename T>
struct MixtureArgs {
    Projection<T> matrices[2][2];  // [kUp, kDown][kRouted, kShared]: layers are experts
    MoePlan plan;
    int m, top_k, shared_items;
    bool scale_input;
    int item_tokens;       // the most pairs of a work item
    bool hidden_is_flags;  // sentinels until it is written (exchange/sentinels.cuh), instead of counted in `done`
    T const* x;            // [m, hidden]
    float* outputs[2];     // [splits of down, pairs in sorted order or tokens, hidden]
    uint32_t* ticket;      // the next task
    uint32_t* done[2];     // [work items, chunk_counters()]: tiles of up that a chunk of hidden values lies in
    int counters;          // of both segments
    uint32_t* greatest;    // [m] magnitude of a token's x (magnitude_bits), and
    float* factors[2];     // [columns_of_items(), 8] of tokens, where wide work items' x becomes FP16
    uint4* parts;          // [part_units]: of even shares PartSums, sentinels until they are written
    int part_units;        // of all shares
    uint32_t one;          // 1, see shift_left
    Divisor tasks_of_item[2][2];  // as `matrices`
    Divisor splits[2];            // [kUp, kDown]
    Divisor chunks, blocks;       // of a tile of up; of the launch

    __device__ __forceinline__ uint32_t* done_of(int segment, int item) const {
        return done[segment] + item * chunk_counters(matrices[kDown][segment].k);
    }
};

// Columns that a work item's tokens take, eight each.
__host__ __device__ constexpr int item_columns(int count) { return (count + 7) / 8; }

// First column of a wide work item; follows from the items' first pairs only.
__host__ __device__ constexpr int64_t first_column(int item, int first) { return first / 8 + item; }
__host__ __device__ constexpr int64_t columns_of_items(int64_t rows, int64_t items) { return rows / 8 + items; }

// Layout of staged activations in global memory: row by row, a row's chunks one after another, each as in a staged tile
// (RowStagedTile).
template <typename T>
class RowImage {
 public:
    static __host__ __device__ int64_t row_bytes(int k) { return int64_t{chunks_of(k)} * kRowBytes; }

    __device__ __forceinline__ RowImage(uint8_t const* images, int k)
        : data_(const_cast<uint8_t*>(images)), pitch_(row_bytes(k)) {}

    __device__ __forceinline__ uint8_t* chunk(int which, int row) const {
        return data_ + row * pitch_ + static_cast<int64_t>(which) * kRowBytes;
    }
    // Factor of the kRowFactorK values from which * kRowFactorK on. All factors of a chunk are written, even those that
    // nothing reads.
    __device__ __forceinline__ void set_factor(int which, int row, float factor) const {
        uint8_t* const place = chunk(which / kFactors, row) + RowStagedTile<true>::factor_offset(which % kFactors);
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

// Tasks are taken while another launch still makes the plan: its work items are sentinels until they are written
// (RouteArgs).
constexpr int kPollNanoseconds = 20;
__device__ __forceinline__ int await_item_count(MoePlan const& plan) {
    uint32_t count;
    while ((count = w4a16::load_word(plan.item_count)) == ~0u) __nanosleep(kPollNanoseconds);
    return static_cast<int>(count);
}
__device__ __forceinline__ WorkItem await_item(MoePlan const& plan, int which) {
    uint4 item;
    while (w4a16::has_sentinel(item = w4a16::load_eight(plan.items + which))) __nanosleep(kPollNanoseconds);
    return {static_cast<int>(item.x), static_cast<int>(item.y), static_cast<int>(item.z), static_cast<int>(item.w)};
}

// A tile of a work item's projection by some chunks of K.
struct MixtureTask {
    int phase, segment, item;  // the work item's number within its segment
    int expert, first, count;
    int tile, split, begin, end;
    int columns[kWarpgroups];  // that a warpgroup multiplies: none where it has no rows
    float* outputs;            // of down: the first token's
    int share, first_share;    // of gate and up: this one, and its tile's first: the last adds those before it

    // The task that `number` stands for, of those from phase `from` on.
    template <typename T>
    __device__ __forceinline__ MixtureTask(MixtureArgs<T> const& args, int routed_items, int from, int number)
        : phase(kNoPhase), share(0), first_share(0) {
#pragma unroll 1
        for (int i = 2 * from; i < 4; ++i) {
            Projection<T> const& matrix = args.matrices[i / 2][1 - i % 2];
            int const items = i % 2 == 0 ? args.shared_items : routed_items;
            int const of_item = tiles_of(matrix.rows) * matrix.split.splits;
            if (number >= items * of_item) {
                number -= items * of_item;
                continue;
            }
            phase = i / 2;
            segment = 1 - i % 2;
            item = args.tasks_of_item[phase][segment].of(number);
            int const part = number - item * of_item, chunks = chunks_of(matrix.k);
            Divisor const splits = args.splits[phase];
            tile = splits.of(part);
            split = part - tile * matrix.split.splits;
            begin = splits.of(split * chunks);
            end = splits.of((split + 1) * chunks);
            expert = 0;
            if (segment == kRouted && args.m == 1) {
                first = item;
                count = 1;
            } else if (segment == kRouted) {
                WorkItem const routed = await_item(args.plan, item);
                expert = routed.expert;
                first = routed.first;
                count = routed.count;
            } else {
                first = item * args.item_tokens;
                count = min(args.item_tokens, args.m - first);
            }
            for (int i = 0; i < kWarpgroups; ++i) {
                columns[i] = tile * kTileRows + i * kGroupRows < matrix.rows ? item_columns(count) : 0;
            }
            int64_t const rows = segment == kRouted ? int64_t{args.m} * args.top_k : args.m;
            outputs = args.outputs[segment] + (split * rows + first) * matrix.rows;
            break;
        }
    }
    MixtureTask() = default;

    // With one token each expert has one work item, and only which expert it is remains to be read.
    __device__ __forceinline__ void await_expert(MoePlan const& plan) {
        if (segment == kRouted) expert = await_item(plan, item).expert;
    }

    // Whether another share adds up this one's partial sums.
    template <typename T>
    __device__ __forceinline__ bool is_part(MixtureArgs<T> const& args) const {
        return phase == kUp && end < chunks_of(args.matrices[kUp][segment].k);
    }
};

constexpr int kAhead = 3;  // chunks of weights still to fetch when the next task is taken
constexpr int kQueue = 8;  // short tasks: weights of several are in flight at once

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

// Blocks may share tiles of gate and up: with hardly more tiles than blocks, some blocks would have two and others one.

// The chunks of all tiles of gate and up, one after another, cut into even shares, a ticket each. The share with a
// tile's end adds up the tile's partial sums. A share takes its last tile first, whose end is another share's, so that
// its part is there long before it is needed.
struct EvenShares {
    int tiles, chunks, count;  // chunks of a tile; shares
    int least, longer;         // chunks of a share, of which the first so many have one more

    template <typename T>
    __device__ __forceinline__ EvenShares(MixtureArgs<T> const& args, int routed_items) {
        tiles = args.shared_items * tiles_of(args.matrices[kUp][kShared].rows) +
                routed_items * tiles_of(args.matrices[kUp][kRouted].rows);
        chunks = chunks_of(args.matrices[kUp][kRouted].k);
        int const blocks = static_cast<int>(gridDim.x);
        count = min(blocks, tiles * chunks);
        least = max(args.blocks.of(tiles * chunks), 1);
        longer = max(tiles * chunks - least * blocks, 0);
    }

    __device__ __forceinline__ int begin(int share) const { return least * share + min(share, longer); }
    // By divisions: a share asks for one chunk at most.
    __device__ __forceinline__ int share_of(int chunk) const {
        return chunk < begin(longer) ? chunk / (least + 1) : (chunk - longer) / least;
    }

    // Calls f(task) for a share's tasks.
    template <typename T, typename F>
    __device__ __forceinline__ void each(MixtureArgs<T> const& args, int routed_items, int share, F&& f) const {
        int const first = begin(share);
#pragma unroll 1
        for (int end = begin(share + 1); end > first;) {
            int const tile = args.chunks.of(end - 1), start = tile * chunks;
            MixtureTask task(args, routed_items, kUp, tile);
            task.begin = max(first - start, 0);
            task.end = end - start;
            task.share = share;
            task.first_share = task.begin > 0 ? share_of(start) : share;
            f(task);
            end = start + task.begin;
        }
    }
};

// A lane's partial sums of a column, for the share that has the tile's end: sentinels until they are written, as hidden
// values are, because a fence and a count take longer. With one token the first of a row's four lanes has them.
template <bool kOne>
struct PartSums {
    static constexpr int kLanes = 32 * kWarps / (kOne ? 4 : 1), kFours = kOne ? 1 : 2;
    static constexpr int kUnits = kLanes * kFours;  // of a share

    static __device__ __forceinline__ bool has_lane() { return !kOne || threadIdx.x % 4 == 0; }
    static __device__ __forceinline__ uint4* place(uint4* parts, int share, int four) {
        return parts + share * kUnits + four * kLanes + threadIdx.x / (kOne ? 4 : 1);
    }
    static __device__ __forceinline__ float& sum(float (&acc)[2][4], int four, int i) {
        return kOne ? acc[i / 2][i % 2 * 2] : acc[four][i];
    }

    static __device__ __forceinline__ void store(uint4* parts, int share, float (&acc)[2][4]) {
        if (!has_lane()) return;
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            auto const bits = [&](int i) { return __float_as_uint(sum(acc, four, i)); };
            w4a16::store_eight(place(parts, share, four), make_uint4(bits(0), bits(1), bits(2), bits(3)));
        }
    }

    // Adds the parts of shares from `first` to `end`, in their order.
    static __device__ __forceinline__ void add(uint4* parts, int first, int end, float (&acc)[2][4]) {
        constexpr int kShares = 4 / kFours, kBatch = 4;  // as many trips to L2 at once
        if (!has_lane()) return;
#pragma unroll 1
        for (; first < end; first += kShares) {
            uint4 batch[kBatch];
            auto const load = [&](int i, bool wanted) {
                if (wanted) batch[i] = w4a16::load_eight(place(parts, first + i / kFours, i % kFours));
            };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                batch[i] = make_uint4(0u, 0u, 0u, 0u);
                load(i, first + i / kFours < end);
            }
            w4a16::await_all<kBatch>([&](int i) { return w4a16::has_sentinel(batch[i]); }, load);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                sum(acc, i % kFours, 0) += __uint_as_float(batch[i].x);
                sum(acc, i % kFours, 1) += __uint_as_float(batch[i].y);
                sum(acc, i % kFours, 2) += __uint_as_float(batch[i].z);
                sum(acc, i % kFours, 3) += __uint_as_float(batch[i].w);
            }
        }
    }
};

// The dispatcher, a thread of every block, takes tasks a little ahead and puts them in a queue, from which the block's
// other warps read them.

// What multiplying warps read of a task at its end.
template <typename T>
__device__ __forceinline__ void prefetch_epilogue(Projection<T> const& matrix, MixtureTask const& task) {
    constexpr int kLine = 128 / sizeof(T);
    ptx::prefetch(matrix.tensor_scale + task.expert);
    T const* const bias = matrix.bias + static_cast<int64_t>(task.expert) * matrix.rows;
    int const end = min((task.tile + 1) * kTileRows, matrix.rows);
#pragma unroll 1
    for (int row = task.tile * kTileRows; row < end; row += kLine) ptx::prefetch(bias + row);
}

// By one thread. The next task is taken late, so that none waits for a block that is busy, and early enough for weights
// to stay in flight.
template <bool kEven, bool kOne, typename T>
__device__ __forceinline__ void dispatch(MixtureArgs<T> const& args, TaskQueue& queue) {
    w4a16::RingPosition place;
    uint32_t round = 0;
    auto const put = [&](MixtureTask const& task) {
        ptx::mbarrier_wait(ptx::shared_address(&queue.empty[place.stage]), place.round ^ 1);
        queue.tasks[place.stage] = task;
        ptx::mbarrier_arrive(ptx::shared_address(&queue.full[place.stage]));
        place.advance(kQueue);
    };
    // Returns once the task has few chunks left.
    auto const run = [&](MixtureTask task) {
        if constexpr (kOne) task.await_expert(args.plan);
        put(task);
        prefetch_epilogue(args.matrices[task.phase][task.segment], task);
        ptx::mbarrier_wait(ptx::shared_address(&queue.ending), round);
        round ^= 1;
    };
    auto const take_ticket = [&] { return static_cast<int>(atomicAdd(args.ticket, 1u)); };
    int ticket = take_ticket(), before = 0;
    int const routed_items = kOne ? args.top_k : await_item_count(args.plan);
    if constexpr (kEven) {
        EvenShares const shares(args, routed_items);
#pragma unroll 1
        for (; ticket < shares.count; ticket = take_ticket()) shares.each(args, routed_items, ticket, run);
        before = shares.count;
    }
#pragma unroll 1
    for (;; ticket = take_ticket()) {
        MixtureTask const task(args, routed_items, kEven ? kDown : kUp, ticket - before);
        if (task.phase == kNoPhase) {
            put(task);
            break;
        }
        run(task);
    }
}

}  // namespace trt_nvfp4::sm90
