// Multiplying a task, a tile by some chunks of K, on SM90: two warpgroups multiply what a third puts into slots
// (weights) and panels (activations).
#pragma once

#include "ptx/grid.cuh"
#include "sm90_w4a16_gemm.cuh"
#include "sm90_w4a16_weights.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kTaskThreads = 32 * (kWarps + 4);  // a whole warpgroup beside those that multiply, for its registers

// Activations of a chunk of K.
template <int kTokens>
constexpr int kChunkBytes = kChunk * kTokens * 2;
template <int kTokens>
constexpr int kChunkPanels = 65536 / kChunkBytes<kTokens>;

// Up to 16 tokens, warps multiply by mma.sync, each for itself.
template <int kTokens>
constexpr bool kSync = kTokens <= 16;

// Blocks that share the copies of activations: those of a cluster, where there is enough to copy. A warp frees a panel
// for each of them by one arrival, where it does so alone by all of its lanes, which racecheck asks for.
template <int kTokens>
constexpr int kSharers = kSync<kTokens> ? 1 : kMaxCluster;
template <int kTokens>
constexpr int kPanelReleases = kWarps * (kSharers<kTokens> == 1 ? 32 : kSharers<kTokens>);

template <int kTokens>
struct TaskShared {
    WeightSlots weights;  // first: the copy engine's pattern of 16-byte columns is one of addresses
    uint8_t panels[kChunkPanels<kTokens>][kChunkBytes<kTokens>];
    uint64_t full[kChunkPanels<kTokens>], empty[kChunkPanels<kTokens>];

    // By one thread, before anything else. A panel is full after `fillings` arrivals.
    __device__ __forceinline__ void init(int fillings) {
        weights.init();
        for (int i = 0; i < kChunkPanels<kTokens>; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), fillings);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), kPanelReleases<kTokens>);
        }
        ptx::mbarrier_init_fence();
    }
};

// 208 and 88 of the 168 registers that each of the three warpgroups starts with: for those that multiply and the third.
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 208;"); }
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 88;"); }

// Where a warp is in its warpgroup's slots, which are every second, and in the panels.
struct Places {
    w4a16::RingPosition slot, panel;
};

// A warp's rows of a task times the activations.
template <typename T, int kTokens, typename F>
__device__ __forceinline__ void multiply_task(TaskShared<kTokens>& shared, Task const& task, uint32_t one, Places& at,
                                              float (&acc)[2][kTokens / 2], F&& before_last) {
    constexpr int kGroups = kChunk / kGroup;
    constexpr int kGroupBytes = kChunkBytes<kTokens> / kGroups;
    int const row = row_of_lane();
    uint32_t const own_byte = own_scale_byte();
    int finished = -1;  // the panel whose multiplications may still be under way
    auto const release_panel = [&](int which, uint32_t read = 0) {
        uint32_t const empty = ptx::shared_address(&shared.empty[which]) + zero_behind(read, one);
        if constexpr (kSharers<kTokens> == 1) {
            ptx::mbarrier_arrive(empty);
        } else {
            int const lane = threadIdx.x % 32;
            if (lane < kSharers<kTokens>) ptx::mbarrier_arrive_at(empty, lane);
        }
    };
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
    auto const slot = [&] { return at.slot.stage * kWarpgroups + static_cast<int>(threadIdx.x) / 128; };
    // Codes are a group ahead of their products.
    Codes next = first_group(shared.weights, slot(), at.slot.round, row);
#pragma unroll 1
    for (int chunk = task.begin; chunk < task.end; ++chunk) {
        if (chunk + 1 == task.end) before_last();
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.panel.stage]), at.panel.round);
        uint32_t const units = ptx::shared_address(shared.panels[at.panel.stage]);
        uint32_t read = 0;
        uint64_t const b = kSync<kTokens> ? 0 : ptx::uniform_descriptor(units, kTokens * 16, 128);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            Codes const codes = next;
            if (group + 1 < kGroups) {
                next = load_group(shared.weights, slot(), row, group + 1);
            } else {
                ptx::mbarrier_arrive(ptx::shared_address(&shared.weights.empty[slot()]) + zero_behind(codes, one));
                at.slot.advance(kSlots / kWarpgroups);
                if (chunk + 1 < task.end) next = first_group(shared.weights, slot(), at.slot.round, row);
            }
            if constexpr (kSync<kTokens>) {
                read = multiply_group_sync<T, kTokens>(codes, own_byte, one, units + group * kGroupBytes, acc);
            } else {
                multiply_group<T, kTokens>(codes, own_byte, one, ptx::advance(b, group * kGroupBytes), acc,
                                           [&](int word) {
                                               // All but this word's have finished: the panel before is free.
                                               if (word == 0 && group == 0 && finished >= 0) release_panel(finished);
                                           });
            }
        }
        if constexpr (kSync<kTokens>) {
            release_panel(at.panel.stage, read);
        } else {
            finished = at.panel.stage;
        }
        at.panel.advance(kChunkPanels<kTokens>);
    }
    if constexpr (!kSync<kTokens>) {
        ptx::wgmma_wait<0>();
        release_panel(finished);
    }
}

}  // namespace trt_nvfp4::sm90
