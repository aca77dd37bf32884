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
#include "ptx/wgmma.cuh"
#include "scale_layout.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm90_w4a16_image.cuh"
#include "smooth_activation.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarps = 8;  // that multiply; one more copies
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kWarpRows = 32;
constexpr int kCodeBytes = kWarpRows * kChunk / 2;
constexpr int kStageBytes = kCodeBytes + kWarpRows * kChunk / kBlock;
constexpr int kStages = 2;
constexpr int kPanelK = 128;  // values of K that arrive together

template <int kTokens>
constexpr int kPanelBytes = kPanelK * kTokens * 2;
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

// Exactly one of y, image and partials is written.
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
    bool gated;
    float alpha, limit;
    T* y;            // [m, rows]
    uint8_t* image;  // of the hidden layer, of padded_width values
    int padded_width;
    float* partials;  // [splits, tokens, padded rows]
    uint32_t one;     // 1, see shift_left
};

// The work of a cluster: its blocks' tiles are neighbours.
struct Task {
    int tile, part;
    int begin, end;  // chunks

    __device__ __forceinline__ Task(Split const& split, int chunks, int task) {
        part = task % split.splits;
        tile = task / split.splits * split.cluster + ptx::cluster_rank();
        begin = part * chunks / split.splits;
        end = (part + 1) * chunks / split.splits;
    }
};

// The 8 rows that a warp has of each quarter of its warpgroup's 128. Where an image is written from gates and ups, they
// are chosen so that pairs of hidden values are one lane's.
struct WarpRows {
    int first, stride;

    __device__ __forceinline__ explicit WarpRows(bool pairs) {
        int const warp = threadIdx.x / 32 % 4;
        first = pairs ? warp / 2 * 16 + warp % 2 * 4 : warp * 8;
        stride = pairs ? 8 : 4;
    }
    __device__ __forceinline__ int operator()(int i) const { return first + i % 4 + i / 4 * stride; }
};

// One warp's weights, chunk after chunk of task after task.
class WeightStream {
 public:
    template <typename T>
    __device__ WeightStream(GemmArgs<T> const& args, WarpRows const& rows, int tasks, int task, int step, uint8_t* ring)
        : codes_(args.codes),
          scales_(args.scales),
          rows_total_(args.rows),
          k_(args.k),
          split_(args.split),
          rows_(rows),
          tasks_(tasks),
          task_(task),
          task_step_(step),
          ring_(ptx::shared_address(ring)) {
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
        Task const task(split_, chunks_of(k_), task_);
        int const lane = threadIdx.x % 32;
        int const group = task.tile * 2 + threadIdx.x / 128;
        chunk_ = task.begin;
        end_ = task.end;
        int const first_row = group * 128 + rows_(lane / 8);
        rows_left_ = rows_total_ - first_row;
        whole_ = group * 128 + 128 <= rows_total_ && k_ % kChunk == 0;
        code_ = codes_ + static_cast<int64_t>(first_row) * (k_ / 2) + lane % 8 * 16 + chunk_ * (kChunk / 2);
        int const scale_tiles = static_cast<int>(padded_blocks(k_) / 4);
        scale_ =
            scales_ + (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 + rows_(lane % 8) * 16;
    }

    // Copy i of a lane: row lane / 8 + 4 * (i % 2) of the warp's in quarter i / 2, its 16-byte column lane % 8.
    // Neighbouring rows swap columns, so that load_group reads without bank conflicts.
    __device__ __forceinline__ void fetch(int stage) {
        if (task_ < tasks_) {
            int const lane = threadIdx.x % 32;
            uint32_t const destination = ring_ + stage * kStageBytes;
            uint32_t const row = destination + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 * 2)) * 16;
            uint32_t const scale = destination + kCodeBytes + lane * 16;
            int const pitch = k_ / 2;
            if (whole_) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    ptx::cp_async_16(row + i * 4 * (kChunk / 2), code_ + static_cast<int64_t>(pitch) * offset(i));
                }
                ptx::cp_async_16(scale, scale_);
            } else {
                // Zeros where rows or K end.
                bool const inside = chunk_ * kChunk + lane % 8 * 32 < k_;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    bool const valid = inside && offset(i) < rows_left_;
                    ptx::cp_async_16(row + i * 4 * (kChunk / 2),
                                     valid ? code_ + static_cast<int64_t>(pitch) * offset(i) : codes_, valid);
                }
                bool const valid = (chunk_ * 4 + lane / 8) * 64 < k_ && rows_left_ + rows_(lane / 8) > 0;
                ptx::cp_async_16(scale, valid ? scale_ : scales_, valid);
            }
            code_ += kChunk / 2;
            scale_ += 4 * 512;
            if (++chunk_ == end_) {
                task_ += task_step_;
                open();
            }
        }
        ptx::cp_async_commit();
    }

    // Of copy i's row from the lane's first.
    __device__ __forceinline__ int offset(int i) const { return i / 2 * 32 + i % 2 * rows_.stride; }

    uint8_t const* const codes_;
    uint8_t const* const scales_;
    int const rows_total_, k_;
    Split const split_;
    WarpRows const rows_;
    int const tasks_;
    int task_;
    int const task_step_;
    uint32_t const ring_;
    int stage_ = 0;
    int chunk_, end_, rows_left_;
    bool whole_;
    uint8_t const* code_;
    uint8_t const* scale_;
};

// What a lane multiplies of a group: 16 values of 4 rows, one of each quarter.
struct Codes {
    uint2 words[4];
    uint32_t scales[4];
};

__device__ __forceinline__ Codes load_group(uint8_t const* stage, int group) {
    int const g = threadIdx.x % 32 / 4;
    int const t = threadIdx.x % 4;
    Codes codes;
    uint4 const scales = *reinterpret_cast<uint4 const*>(stage + kCodeBytes + (group * 8 + g) * 16);
    codes.scales[0] = scales.x;
    codes.scales[1] = scales.y;
    codes.scales[2] = scales.z;
    codes.scales[3] = scales.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int const column = (group * 2 + t / 2) ^ (g % 4 * 2);
        codes.words[i] = *reinterpret_cast<uint2 const*>(stage + (i * 8 + g) * (kChunk / 2) + column * 16 + t % 2 * 8);
    }
    return codes;
}

// The eight sums of a lane: rows of quarter lane % 4, for a token.
template <typename T, int kTokens>
class Epilogue {
 public:
    __device__ __forceinline__ Epilogue(GemmArgs<T> const& args, WarpRows const& rows, Task const& task)
        : args_(args), rows_(rows), part_(task.part) {
        row_ = task.tile * kTileRows + threadIdx.x / 128 * 128 + threadIdx.x % 4 * 32;
        ptx::prefetch(args.tensor_scale);
        if (row_ + rows_(0) < args.rows) ptx::prefetch(args.bias + row_ + rows_(0));
    }

    // Before the first write.
    __device__ __forceinline__ void load() {
        scale_ = *args_.tensor_scale * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const row = row_ + rows_(i);
            bias_[i] = row < args_.rows ? args_.bias[row] : ptx::from_float<T>(0.0f);
        }
    }

    __device__ __forceinline__ void write(int token, float const (&sums)[8]) const {
        if (args_.partials != nullptr) {
            int const pitch = padded_rows(args_.rows, args_.split.cluster);
            int const row = row_ + rows_(0);
            float4* const out = reinterpret_cast<float4*>(
                args_.partials + (static_cast<int64_t>(part_) * kTokens + token) * pitch + row);
            out[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            out[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
            return;
        }
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = fmaf(sums[i], scale_, ptx::to_float(bias_[i]));
        if (args_.gated) {
            gate_eight(args_.activation, args_.alpha, args_.limit, values);
            // Values 0, 1 and, 4 further, 2, 3.
            int const column = (row_ + rows_(0)) / 2;
            if (column < args_.padded_width) {
                store_pair(column, token, values[0], values[2]);
                store_pair(column + 1, token, values[1], values[3]);
            }
            return;
        }
        activate_eight(args_.activation, values);
        int const column = row_ + rows_(0);
        if (args_.image != nullptr) {
            if (column >= args_.padded_width) return;
#pragma unroll
            for (int i = 0; i < 4; ++i) store_pair(column + i, token, values[i], values[i + 4]);
            return;
        }
        if (token >= args_.m) return;
        __align__(16) T rounded[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded[i] = ptx::from_float<T>(values[i]);
        T* const out = args_.y + static_cast<int64_t>(token) * args_.rows + column;
        if (args_.rows % 8 == 0) {
            if (column < args_.rows) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4 const*>(rounded);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + i < args_.rows) out[i] = rounded[i];
        }
    }

 private:
    __device__ __forceinline__ void store_pair(int k, int token, float first, float second) const {
        __align__(4) T const pair[2] = {ptx::from_float<T>(first), ptx::from_float<T>(second)};
        *reinterpret_cast<uint32_t*>(args_.image + pair_offset<kTokens>(k, token)) =
            *reinterpret_cast<uint32_t const*>(pair);
    }

    GemmArgs<T> const& args_;
    WarpRows const rows_;
    int const part_;
    int row_;
    float scale_;
    T bias_[8];
};

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
            uint32_t const destination = ptx::shared_address(shared.panels[panel]) + mine;
            uint8_t const* const source = args.x + static_cast<int64_t>(i) * kPanelBytes<kTokens> + mine;
            if (cluster == 1) {
                ptx::bulk_copy(destination, source, slice, full);
            } else {
                ptx::bulk_copy_multicast(destination, source, slice, full, static_cast<uint16_t>((1 << cluster) - 1));
            }
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
    WarpRows const rows(args.gated && args.image != nullptr);
    WeightStream stream(args, rows, tasks, first, step, shared.weights[warp][0]);
    Turned& turned = shared.turned[warp];
    uint32_t const panels = ptx::shared_address(shared.panels[0]);
    uint32_t const own_byte = 0x4040u | lane % 4 * 0x0101u;  // selects scale t of four, in both halves
    int panel = 0;
    uint32_t parity = 0;
    int finished = -1;  // the panel whose multiplications may still be under way
    auto const release = [&](int which) {
        if (lane < args.split.cluster) ptx::mbarrier_arrive_at(ptx::shared_address(&shared.empty[which]), lane);
    };
    for (int index = first; index < tasks; index += step) {
        Task const task(args.split, chunks_of(args.k), index);
        Epilogue<T, kTokens> epilogue(args, rows, task);
        float acc[2][kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
            uint8_t const* const stage = shared.weights[warp][stream.acquire()];
#pragma unroll
            for (int group = 0; group < kChunk / kGroup; ++group) {
                constexpr int kGroupsPerPanel = kPanelK / kGroup;
                Codes const codes = load_group(stage, group);
                uint32_t scales[4];
#pragma unroll
                for (int row = 0; row < 4; ++row) {
                    scales[row] = w4a16::Decoder<T>::widen(__byte_perm(codes.scales[row], 0u, own_byte), args.one);
                }
                if (group % kGroupsPerPanel == 0) ptx::mbarrier_wait(ptx::shared_address(&shared.full[panel]), parity);
                uint32_t const b = panels + panel * kPanelBytes<kTokens> +
                                   group % kGroupsPerPanel * (kPanelBytes<kTokens> / kGroupsPerPanel);
#pragma unroll
                for (int word = 0; word < 2; ++word) {
                    uint32_t a[4][4];
#pragma unroll
                    for (int row = 0; row < 4; ++row) {
                        w4a16::Decoder<T>::codes(word == 0 ? codes.words[row].x : codes.words[row].y, args.one, a[row]);
#pragma unroll
                        for (int pair = 0; pair < 4; ++pair) {
                            a[row][pair] = w4a16::multiply<T>(a[row][pair], scales[row]);
                        }
                    }
                    ptx::wgmma_fence();
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint64_t const descriptor =
                            ptx::matrix_descriptor(b + (word * 4 + half * 2) * kTokens * 16, kTokens * 16, 128);
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            ptx::wgmma<T>(acc[i], a[2 * i][2 * half], a[2 * i + 1][2 * half], a[2 * i][2 * half + 1],
                                          a[2 * i + 1][2 * half + 1], descriptor);
                        }
                    }
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<1>();
                    // All but this word's have finished: the panel before is free.
                    if (word == 0 && group % kGroupsPerPanel == 0 && finished >= 0) release(finished);
                }
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
        if (args.partials == nullptr) epilogue.load();
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
