// The dispatcher, a thread of every block, takes tasks a little ahead and puts them in a queue, from which the block's
// other warps read them.
#pragma once

#include "ptx/prefetch.cuh"
#include "w4a16/sm90_moe/sm90_w4a16_moe_shares.cuh"

namespace trt_nvfp4::sm90 {

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
// to stay on their way.
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
    int const routed_jobs = kOne ? args.top_k : await_job_count(args.plan);
    if constexpr (kEven) {
        EvenShares const shares(args, routed_jobs);
#pragma unroll 1
        for (; ticket < shares.count; ticket = take_ticket()) shares.each(args, routed_jobs, ticket, run);
        before = shares.count;
    }
#pragma unroll 1
    for (;; ticket = take_ticket()) {
        MixtureTask const task(args, routed_jobs, kEven ? kDown : kUp, ticket - before);
        if (task.phase == kNoPhase) {
            put(task);
            break;
        }
        run(task);
    }
}

}  // namespace trt_nvfp4::sm90
