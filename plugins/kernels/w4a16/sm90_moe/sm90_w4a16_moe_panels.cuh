// Activations of sm90_w4a16_moe.cuh on their way from images to panels, by a warp: a lane for each of a job's rows. Of
// wide jobs images are what panels have.
//
// Hidden values are awaited by how many tiles have been counted or, where blocks share tiles evenly, are flags: there
// all blocks come to down at the same time, and neither fences nor counters are waited for.
#pragma once

#include "w4a16/sm90_moe/sm90_w4a16_moe_dispatch.cuh"
#include "w4a16/sm90_moe/sm90_w4a16_moe_wide.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kLandings = 4;  // panels under way whose values are flags

// A column's rows from where a lane's row is.
__device__ __forceinline__ void copy_rows(uint8_t* panel, uint8_t const* from, int column, int count,
                                          uint32_t barrier) {
    int const lane = threadIdx.x % 32;
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, min(8, count - column * 8) * kRowBytes);
    __syncwarp();
    if (lane / 8 != column || lane >= count) return;
    ptx::bulk_copy(ptx::shared_address(panel + lane % 8 * kRowBytes), from, kRowBytes, barrier);
}

// Whether a value of a panel's first rows is absent.
__device__ __forceinline__ bool has_absent(uint8_t const* panel, int rows) {
    int const lane = threadIdx.x % 32;
    bool absent = false;
#pragma unroll 1
    for (int row = 0; row < rows; ++row, panel += kRowBytes) {
        absent |= w4a16::has_absent(reinterpret_cast<uint4 const*>(panel)[lane]);
        if (lane >= kChunk / kRowFactorK) continue;
        absent |= *reinterpret_cast<uint32_t const*>(panel + RowPanel<true>::factor_offset(lane)) == ~0u;
    }
    return __any_sync(0xffffffffu, absent);
}

// Copies of a task's chunks of hidden values that are flags. Each is looked at, and made anew until no value is absent:
// of the first chunk before the others are asked for, because who asks in vain holds up weights.
class FlagFetcher {
 public:
    template <class Shared>
    __device__ __forceinline__ void fetch(Shared& shared, uint8_t const* from, int chunks, int count,
                                          w4a16::RingPosition& place) {
        auto& task = shared.task;
        w4a16::RingPosition asked = place;
        int next = 0;
        auto const landed = [&](int chunk) { return ptx::shared_address(&shared.landed[chunk % kLandings]); };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, place.advance(task.kPanels)) {
            int const end = chunk == 0 ? 1 : min(chunk + kLandings, chunks);
#pragma unroll 1
            for (; next < end; ++next, asked.advance(task.kPanels)) {
                ptx::mbarrier_wait(ptx::shared_address(&task.empty[asked.stage]), asked.round ^ 1);
                copy_rows(task.panels[asked.stage], from + next * kRowBytes, 0, count, landed(next));
            }
            uint8_t* const panel = task.panels[place.stage];
            while (true) {
                ptx::mbarrier_wait(landed(chunk), rounds_ >> chunk % kLandings & 1);
                rounds_ ^= 1u << chunk % kLandings;
                if (!has_absent(panel, count)) break;
                copy_rows(panel, from + chunk * kRowBytes, 0, count, landed(chunk));
            }
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&task.full[place.stage]));
            __syncwarp();
        }
    }

 private:
    uint32_t rounds_ = 0;  // a bit of each landing
};

template <typename T, class Shared>
__device__ __forceinline__ void fetch_activations(MixtureArgs<T> const& args, Shared& shared) {
    int const lane = threadIdx.x % 32;
    w4a16::RingPosition place;
    FlagFetcher flags;
    // What launches before this one wrote is now read by the copy engine.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    shared.queue.each([&](MixtureTask const& task, [[maybe_unused]] w4a16::RingPosition const& in_queue) {
        int const end = task.end, count = task.count, columns = job_columns(count);
        Projection<T> const& matrix = args.matrices[task.phase][task.segment];
        ReadyChunks ready(args.done_of(task.segment, task.job), args.matrices[kUp][task.segment].tiles_per_chunk(),
                          task.phase == kDown ? task.begin : end, end);
        if constexpr (Shared::kWide) {
            FactorCopy factors;
            if constexpr (Shared::kHasFactors) {
                if (task.phase == kUp) {
                    factors = {args.factors[task.segment] + first_column(task.job, task.first) * 8,
                               ptx::shared_address(shared.factors.of_task[in_queue.stage])};
                }
            }
            copy_chunks(shared.task, task, JobImage(matrix, task.job, task.first, count), factors, ready, place);
            return;
        }
        int row = task.first + min(lane, count - 1);
        if (task.phase == kUp && task.segment == kRouted && !args.scale_input) {
            row = args.plan.order[row] / args.top_k;
        }
        uint8_t const* from = RowImage<T>(matrix.x, matrix.k).chunk(task.begin, row);
        if (Shared::kEven && task.phase == kDown) {
            flags.fetch(shared, from, end - task.begin, count, place);
            return;
        }
#pragma unroll 1
        for (int chunk = task.begin; chunk < end; ++chunk, from += kRowBytes) {
            ready.await(chunk);
#pragma unroll 1
            for (int column = 0; column < columns; ++column, place.advance(shared.task.kPanels)) {
                ptx::mbarrier_wait(ptx::shared_address(&shared.task.empty[place.stage]), place.round ^ 1);
                copy_rows(shared.task.panels[place.stage], from, column, count,
                          ptx::shared_address(&shared.task.full[place.stage]));
            }
        }
        __syncwarp();
    });
}

}  // namespace trt_nvfp4::sm90
