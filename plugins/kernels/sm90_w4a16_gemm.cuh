// One projection of 17 to 64 tokens on SM90: W x^T by wgmma, weights (A) decoded in registers, tokens (B) from an image
// in shared memory (sm90_w4a16_image.cuh). At these token counts mma.sync would keep the tensor cores busier than the
// memory.
//
// A block's tile is 256 rows: two warpgroups of 128, a warp having 8 rows of each quarter of its 128-row group, so that
// scales come whole. Every warp streams its own weights through a ring of its own; one thread feeds all of them with
// activations, which the blocks of a cluster, at the same K, fetch once for all.
//
// Launches are chained: weights never depend on the launch before, so they are on their way before it has finished.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/element.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "sm90_w4a16_copies.cuh"
#include "smooth_activation.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarps = 8;  // that multiply; one more copies
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kStages = 2;

template <int kTokens>
constexpr int kPanels = 65536 / kPanelBytes<kTokens>;

constexpr int kTurnPitch = kWarpRows + 4;  // keeps the writes free of bank conflicts
using Turned = float[8][kTurnPitch];

template <int kTokens>
struct Shared {
    uint8_t panels[kPanels<kTokens>][kPanelBytes<kTokens>];
    uint8_t weights[kWarps][kStages][kStageBytes];
    Turned turned[kWarps];
    uint64_t full[kPanels<kTokens>], empty[kPanels<kTokens>];
};

// One of y and partials is written.
template <typename T>
struct GemmArgs {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    T const* bias;
    int rows, k, m;
    Split split;
    uint8_t const* x;  // an image
    TrtNvfp4Activation activation;
    T* y;             // [m, rows]
    float* partials;  // [splits, tokens, padded rows]
    uint32_t one;     // 1, see shift_left
};

// The work of a cluster: its blocks' tiles are neighbours.
struct Task {
    int tile, part;
    int begin, end;  // chunks

    __device__ __forceinline__ Task(int tile, int begin, int end) : tile(tile), part(0), begin(begin), end(end) {}
    __device__ __forceinline__ Task(Split const& split, int chunks, int task) {
        part = task % split.splits;
        tile = task / split.splits * split.cluster + ptx::cluster_rank();
        begin = part * chunks / split.splits;
        end = (part + 1) * chunks / split.splits;
    }
};

// One warp's weights, chunk after chunk of task after task.
template <typename T>
class WeightStream {
 public:
    __device__ WeightStream(GemmArgs<T> const& args, int tasks, int task, int step, uint8_t* ring)
        : args_(args), tasks_(tasks), task_(task), task_step_(step), ring_(ptx::shared_address(ring)) {
        open();
        for (int stage = 0; stage < kStages; ++stage) fetch(stage);
    }

    __device__ __forceinline__ int acquire() {
        ptx::cp_async_wait<kStages - 1>();
        __syncwarp();
        return stage_;
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        fetch(stage_);
        stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }

 private:
    __device__ void open() {
        if (task_ >= tasks_) return;
        Task const task(args_.split, chunks_of(args_.k), task_);
        copies_ = WeightCopies(args_.codes, args_.scales, args_.rows, args_.k, task.tile * 2 + threadIdx.x / 128,
                               threadIdx.x / 32 % 4, task.begin, task.end);
    }

    __device__ __forceinline__ void fetch(int stage) {
        if (!copies_.done()) {
            copies_.copy(ring_ + stage * kStageBytes);
            copies_.advance();
            if (copies_.done()) {
                task_ += task_step_;
                open();
            }
        }
        ptx::cp_async_commit();
    }

    GemmArgs<T> const& args_;
    int const tasks_;
    int task_;
    int const task_step_;
    uint32_t const ring_;
    int stage_ = 0;
    WeightCopies copies_;
};

// The eight sums of a lane: rows of quarter lane % 4, for a token.
template <typename T, int kTokens>
class Epilogue {
 public:
    __device__ __forceinline__ Epilogue(GemmArgs<T> const& args, Task const& task) : args_(args), part_(task.part) {
        row_ = task.tile * kTileRows + threadIdx.x / 128 * 128 + threadIdx.x % 4 * 32 + threadIdx.x / 32 % 4 * 8;
        ptx::prefetch(args.tensor_scale);
        if (row_ < args.rows) ptx::prefetch(args.bias + row_);
    }

    // Before the first write.
    __device__ __forceinline__ void load() {
        if (args_.partials != nullptr) return;
        scale_ = *args_.tensor_scale * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const row = row_ + i;
            bias_[i] = row < args_.rows ? args_.bias[row] : ptx::from_float<T>(0.0f);
        }
    }

    __device__ __forceinline__ void write(int token, float const (&sums)[8]) const {
        if (args_.partials != nullptr) {
            int const pitch = padded_rows(args_.rows, args_.split.cluster);
            float4* const out = reinterpret_cast<float4*>(
                args_.partials + (static_cast<int64_t>(part_) * kTokens + token) * pitch + row_);
            out[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            out[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
            return;
        }
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = fmaf(sums[i], scale_, ptx::to_float(bias_[i]));
        activate_values(args_.activation, values);
        if (token >= args_.m) return;
        __align__(16) T rounded[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded[i] = ptx::from_float<T>(values[i]);
        T* const out = args_.y + static_cast<int64_t>(token) * args_.rows + row_;
        if (args_.rows % 8 == 0) {
            if (row_ < args_.rows) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4 const*>(rounded);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (row_ + i < args_.rows) out[i] = rounded[i];
        }
    }

 private:
    GemmArgs<T> const& args_;
    int const part_;
    int row_;
    float scale_;
    T bias_[8];
};

// Writes a warp's sums.
template <typename T, int kTokens>
__device__ __forceinline__ void finish_task(Epilogue<T, kTokens>& epilogue, float const (&acc)[2][kTokens / 2],
                                            Turned& turned) {
    int const lane = threadIdx.x % 32;
    // Unrolled only as far as registers must be known: see smooth_activation.cuh.
#pragma unroll 1
    for (int column = 0; column < kTokens / 8; ++column) {
        int const g = lane / 4;
        int const token = lane % 4 * 2;
        __syncwarp();
#pragma unroll
        for (int known = 0; known < kTokens / 8; ++known) {
            if (known != column) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    turned[token + j % 2][i * 16 + j / 2 * 8 + g] = acc[i][known * 4 + j];
                }
            }
        }
        __syncwarp();
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = turned[lane / 4][lane % 4 * 8 + i];
        epilogue.write(column * 8 + lane / 4, sums);
    }
}

// This block's part of a panel, for all blocks of the cluster.
__device__ __forceinline__ void copy_panel(uint8_t* panel, uint8_t const* source, int bytes, uint32_t full,
                                           int cluster) {
    uint32_t const destination = ptx::shared_address(panel);
    if (cluster == 1) {
        ptx::bulk_copy(destination, source, bytes, full);
    } else {
        ptx::bulk_copy_multicast(destination, source, bytes, full, static_cast<uint16_t>((1 << cluster) - 1));
    }
}

template <typename T, int kTokens>
__device__ __forceinline__ void copy_panels(GemmArgs<T> const& args, Shared<kTokens>& shared, int tasks, int first,
                                            int step) {
    int const cluster = args.split.cluster;
    int const slice = kPanelBytes<kTokens> / cluster;
    int const mine = ptx::cluster_rank() * slice;
    int panel = 0;
    uint32_t parity = 1;
    for (int index = first; index < tasks; index += step) {
        Task const task(args.split, chunks_of(args.k), index);
        for (int i = task.begin * (kChunk / kPanelK); i < task.end * (kChunk / kPanelK); ++i) {
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[panel]), parity);
            uint32_t const full = ptx::shared_address(&shared.full[panel]);
            ptx::mbarrier_arrive_expect(full, kPanelBytes<kTokens>);
            copy_panel(shared.panels[panel] + mine, args.x + static_cast<int64_t>(i) * kPanelBytes<kTokens> + mine,
                       slice, full, cluster);
            if (++panel == kPanels<kTokens>) {
                panel = 0;
                parity ^= 1;
            }
        }
    }
}

template <typename T, int kTokens>
__device__ __forceinline__ void multiply(GemmArgs<T> const& args, Shared<kTokens>& shared, int tasks, int first,
                                         int step) {
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    WeightStream stream(args, tasks, first, step, shared.weights[warp][0]);
    Turned& turned = shared.turned[warp];
    uint32_t const own_byte = own_scale_byte();
    int panel = 0;
    uint32_t parity = 0;
    int finished = -1;  // the panel whose multiplications may still be under way
    auto const release = [&](int which) {
        if (lane < args.split.cluster) ptx::mbarrier_arrive_at(ptx::shared_address(&shared.empty[which]), lane);
    };
    for (int index = first; index < tasks; index += step) {
        Task const task(args.split, chunks_of(args.k), index);
        Epilogue<T, kTokens> epilogue(args, task);
        float acc[2][kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
            uint8_t const* const stage = shared.weights[warp][stream.acquire()];
            uint64_t b = 0;
#pragma unroll
            for (int group = 0; group < kChunk / kGroup; ++group) {
                constexpr int kGroupsPerPanel = kPanelK / kGroup;
                Codes const codes = load_group(stage, group);
                if (group % kGroupsPerPanel == 0) {
                    ptx::mbarrier_wait(ptx::shared_address(&shared.full[panel]), parity);
                    b = ptx::uniform_descriptor(ptx::shared_address(shared.panels[panel]), kTokens * 16, 128);
                }
                uint64_t const units =
                    ptx::advance(b, group % kGroupsPerPanel * (kPanelBytes<kTokens> / kGroupsPerPanel));
                multiply_group<T, kTokens>(codes, own_byte, args.one, units, acc, [&](int word) {
                    // All but this word's have finished: the panel before is free.
                    if (word == 0 && group % kGroupsPerPanel == 0 && finished >= 0) release(finished);
                });
                if (group % kGroupsPerPanel == kGroupsPerPanel - 1) {
                    finished = panel;
                    if (++panel == kPanels<kTokens>) {
                        panel = 0;
                        parity ^= 1;
                    }
                }
            }
            stream.release();
        }
        ptx::wgmma_wait<0>();
        // Not sooner: blocks of the next launch would crowd on the SMs that this one leaves free.
        if (index + step >= tasks) ptx::launch_next();
        release(finished);
        finished = -1;
        epilogue.load();
        finish_task<T, kTokens>(epilogue, acc, turned);
    }
}

template <typename T, int kTokens>
__global__ __launch_bounds__(kThreads, 1) void sm90_w4a16_gemm(__grid_constant__ GemmArgs<T> const args) {
    extern __shared__ __align__(128) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared<kTokens>*>(bytes);
    int const cluster = args.split.cluster;
    int const tasks = args.split.tasks(args.rows);
    int const first = blockIdx.x / cluster;
    int const step = gridDim.x / cluster;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kPanels<kTokens>; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), kWarps * cluster);
        }
        ptx::mbarrier_init_fence();
    }
    ptx::cluster_meet();
    // Uniform to the compiler too, which then keeps what all lanes share in uniform registers.
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) < kWarps) {
        multiply<T, kTokens>(args, shared, tasks, first, step);
    } else {
        ptx::await_previous_launch();
        if (threadIdx.x == 32 * kWarps) copy_panels<T, kTokens>(args, shared, tasks, first, step);
    }
    // No block may end while another's copies and arrivals reach its shared memory.
    __syncwarp();
    ptx::cluster_meet();
}

}  // namespace trt_nvfp4::sm90
