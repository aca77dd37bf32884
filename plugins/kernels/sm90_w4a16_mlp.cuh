// y = MLP layers of x for up to 64 tokens on SM90, in one launch: what sm90_w4a16_gemm.cuh does launch by launch
// becomes phases of blocks that are all resident, and weights stay on their way from phase to phase.
//
// A layer: up, which writes the image of the hidden values; down, whose K is split, which writes partial sums; rows,
// which adds them up and writes the next layer's image. What a phase reads, the one before it has written: chunks of K,
// or tiles of rows, count the warps that have written them, and who reads them awaits the count. Each phase needs all
// of the one before, directly or through the next, so that nothing is overwritten while it is read.
//
// Two warpgroups multiply and do the rows. Of a third, which leaves them its registers, two warps fill their rings with
// weights (sm80_w4a16_ring.cuh) and one brings panels of activations, for all blocks of a cluster at once.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/reduce.cuh"
#include "sm80_w4a16_ring.cuh"
#include "sm90_w4a16_gemm.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kFillers = 2;                     // one for a warpgroup
constexpr int kMlpThreads = 32 * (kWarps + 4);  // a whole warpgroup beside those that multiply, for its registers
constexpr int kMlpStages = 4;
constexpr int kStagesInFlight = 12;  // of a block, see sm80_w4a16_ring.cuh
constexpr int kPartColumns = 128;    // of a row, that a warp does at once

static_assert(kMlpStages <= w4a16::kMaxStages && kStageBytes == w4a16::kStageBytes);

template <int kTokens>
struct MlpShared {
    uint8_t panels[kPanels<kTokens>][kPanelBytes<kTokens>];
    uint8_t weights[kWarps][kMlpStages][kStageBytes];
    Turned turned[kWarps];
    uint64_t full[kPanels<kTokens>], empty[kPanels<kTokens>];
    uint64_t rings[kWarps * w4a16::Rings::kBarriers];
};

// How often what has been written, since the launch's start: zero before it.
struct Counts {
    uint32_t* image;     // [chunks of x]: by the warps of rows
    uint32_t* hidden;    // [chunks of hidden values]: by the warps of up
    uint32_t* partials;  // [tiles of down]: by the warps of down
    uint32_t* squares;   // [tokens]: by the warps of rows
};

template <typename T>
struct MlpArgs {
    // Of layer 0, their bias too; the matrices of the others follow.
    GemmArgs<T> up, down;
    int64_t up_codes, up_scales, down_codes, down_scales;  // bytes of a layer
    int layers;
    T const* x;
    T* y;
    uint8_t* image;        // of x
    T const* norm_weight;  // [layers, width of x]; null: no RMSNorm
    float epsilon;
    float* squares;  // [tokens, parts of x]: sums of squares
    bool residual;
    Counts counts;
};

// The GEMM of phase 2 * layer (up) or 2 * layer + 1 (down).
template <typename T>
__device__ __forceinline__ GemmArgs<T> const& gemm_of(MlpArgs<T> const& args, int phase) {
    return phase % 2 == 0 ? args.up : args.down;
}

// One more of a warp's writes, of all lanes, can be read.
__device__ __forceinline__ void count(uint32_t* counter) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ uint32_t load_count(uint32_t const* counter) {
    uint32_t seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}

// Returns, to a warp, once there have been so many.
__device__ __forceinline__ void await_count(uint32_t const* counter, uint32_t target) {
    while (threadIdx.x % 32 == 0 && load_count(counter) < target) continue;
    __syncwarp();
}

// Tiles of up that a chunk of hidden values lies in: all of their warps write it.
template <typename T>
__device__ __forceinline__ int tiles_per_hidden_chunk(GemmArgs<T> const& up) {
    return (up.gated ? 2 : 1) * kChunk / kTileRows;
}

__host__ __device__ constexpr int parts_of(int width) { return (width + kPartColumns - 1) / kPartColumns; }

// Parts of a row in chunk `chunk`.
__device__ __forceinline__ int parts_in(int chunk, int width) {
    return min(kChunk / kPartColumns, parts_of(width) - chunk * (kChunk / kPartColumns));
}

// The rings of a warpgroup's warps, phase after phase.
template <typename T>
__device__ __forceinline__ void fill_phases(MlpArgs<T> const& args, w4a16::Rings const& rings, int warpgroup, int first,
                                            int step) {
    w4a16::RingPosition position;
#pragma unroll 1
    for (int phase = 0; phase < 2 * args.layers; ++phase) {
        GemmArgs<T> const& gemm = gemm_of(args, phase);
        bool const up = phase % 2 == 0;
        auto const rows = [&](int warp) { return WarpRows(warp, up && gemm.gated); };
        uint8_t const* const codes = gemm.codes + phase / 2 * (up ? args.up_codes : args.down_codes);
        uint8_t const* const scales = gemm.scales + phase / 2 * (up ? args.up_scales : args.down_scales);
        int const tasks = gemm.split.tasks(gemm.rows);
#pragma unroll 1
        for (int index = first; index < tasks; index += step) {
            Task const task(gemm.split, chunks_of(gemm.k), index);
            WeightCopies copies(codes, scales, gemm.rows, gemm.k, task.tile * 2 + warpgroup, rows(0), task.begin,
                                task.end);
#pragma unroll 1
            for (; !copies.done(); copies.advance()) {
#pragma unroll 1
                for (int i = 0; i < 4; ++i) {
                    int const warp = warpgroup * 4 + i;
                    copies.copy(rings.open(warp, position), rows(i).first - rows(0).first);
                    rings.close(warp, position);
                    ptx::cp_async_commit();
                    ptx::cp_async_wait<kStagesInFlight / kFillers - 1>();
                }
                position.advance(rings.stages);
            }
        }
    }
}

// Which of a task's chunks of activations can be read. All lanes of a warp ask, because a trip to L2 for each would add
// up.
class ReadyChunks {
 public:
    // Of `counts` each, or where `width` is not 0 of so many for each part of such a row in the chunk.
    __device__ __forceinline__ ReadyChunks(uint32_t const* counters, uint32_t counts, int width, int begin, int end)
        : counters_(counters), counts_(counts), width_(width), next_(begin), end_(end) {}

    // Returns once chunk `chunk` can be read by the copy engine.
    __device__ __forceinline__ void await(int chunk) {
        if (chunk < next_) return;
        while (chunk >= next_) {
            int const mine = next_ + threadIdx.x % 32;
            bool ready = false;
            if (mine < end_) {
                uint32_t const target = width_ == 0 ? counts_ : counts_ * parts_in(mine, width_);
                ready = load_count(counters_ + mine) >= target;
            }
            next_ += __clz(__brev(~__ballot_sync(0xffffffffu, ready)));  // ready ones from the first on
        }
        __syncwarp();
        // What other threads wrote is now read by the copy engine.
        asm volatile("fence.proxy.async.global;" ::: "memory");
    }

 private:
    uint32_t const* const counters_;
    uint32_t const counts_;
    int const width_;
    int next_;
    int const end_;
};

// Panels of activations, phase after phase, as they appear. By a warp.
template <typename T, int kTokens>
__device__ __forceinline__ void bring_panels(MlpArgs<T> const& args, MlpShared<kTokens>& shared, int first, int step) {
    constexpr int kPanelsPerChunk = kChunk / kPanelK;
    int panel = 0;
    uint32_t parity = 1;
#pragma unroll 1
    for (int phase = 0; phase < 2 * args.layers; ++phase) {
        GemmArgs<T> const& gemm = gemm_of(args, phase);
        bool const up = phase % 2 == 0;
        uint32_t const times = phase / 2 + 1;
        int const tasks = gemm.split.tasks(gemm.rows);
        int const cluster = gemm.split.cluster;
        int const slice = kPanelBytes<kTokens> / cluster;
        int const mine = ptx::cluster_rank() * slice;
#pragma unroll 1
        for (int index = first; index < tasks; index += step) {
            Task const task(gemm.split, chunks_of(gemm.k), index);
            ReadyChunks ready = up ? ReadyChunks(args.counts.image, times * args.up.m, gemm.k, task.begin, task.end)
                                   : ReadyChunks(args.counts.hidden, times * tiles_per_hidden_chunk(args.up) * kWarps,
                                                 0, task.begin, task.end);
#pragma unroll 1
            for (int i = task.begin * kPanelsPerChunk; i < task.end * kPanelsPerChunk; ++i) {
                ready.await(i / kPanelsPerChunk);
                if (threadIdx.x % 32 == 0) {
                    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[panel]), parity);
                    uint32_t const full = ptx::shared_address(&shared.full[panel]);
                    ptx::mbarrier_arrive_expect(full, kPanelBytes<kTokens>);
                    copy_panel(shared.panels[panel] + mine,
                               gemm.x + static_cast<int64_t>(i) * kPanelBytes<kTokens> + mine, slice, full, cluster);
                }
                __syncwarp();
                if (++panel == kPanels<kTokens>) {
                    panel = 0;
                    parity ^= 1;
                }
            }
        }
    }
}

// Four neighbouring columns of a token's row.
template <typename T>
struct FourColumns {
    int token, column, width;

    // Elsewhere zeros.
    __device__ __forceinline__ void load(T const* row, float (&values)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = column + i < width ? ptx::to_float(row[column + i]) : 0.0f;
    }
    __device__ __forceinline__ void store(T* rows, float const (&values)[4]) const {
        T* const row = rows + static_cast<int64_t>(token) * width;
        if (width % 4 == 0) {
            __align__(8) T const four[4] = {ptx::from_float<T>(values[0]), ptx::from_float<T>(values[1]),
                                            ptx::from_float<T>(values[2]), ptx::from_float<T>(values[3])};
            if (column < width) *reinterpret_cast<uint2*>(row + column) = *reinterpret_cast<uint2 const*>(four);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (column + i < width) row[column + i] = ptx::from_float<T>(values[i]);
        }
    }
};

// Sums of a token's four columns of down, over the parts of K in their order.
template <typename T, int kTokens>
__device__ __forceinline__ void sum_parts(GemmArgs<T> const& down, int token, int column, float (&sums)[4]) {
    constexpr int kBatch = 16;  // as many trips to L2 at once
    int const pitch = padded_rows(down.rows, down.split.cluster);
    float const* const first = down.partials + static_cast<int64_t>(token) * pitch + column;
    int64_t const step = int64_t{kTokens} * pitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < down.split.splits; begin += kBatch) {
        float4 parts[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            parts[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (begin + j < down.split.splits && column < pitch) {
                parts[j] = __ldcg(reinterpret_cast<float4 const*>(first + (begin + j) * step));
            }
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            sums[0] += parts[j].x;
            sums[1] += parts[j].y;
            sums[2] += parts[j].z;
            sums[3] += parts[j].w;
        }
    }
}

// Calls f with the parts of rows of `width`, and their numbers in the row, that are this warp's.
template <typename T, typename F>
__device__ __forceinline__ void for_parts(int m, int width, F&& f) {
    int const parts = parts_of(width);
#pragma unroll 1
    for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < parts * m; unit += gridDim.x * kWarps) {
        int const part = unit % parts;
        f(FourColumns<T>{unit / parts, part * kPartColumns + static_cast<int>(threadIdx.x) % 32 * 4, width}, part);
    }
}

// A part of a row to the image.
template <typename T, int kTokens>
__device__ __forceinline__ void store_image(MlpArgs<T> const& args, FourColumns<T> const& four, int part,
                                            float const (&values)[4]) {
    // Values k to k + 3 and, of the next lane, k + 4 to k + 7: pairs of k and k + 1, and of k + 2 and k + 3.
    bool const upper = threadIdx.x % 2 != 0;
    int const k = four.column - (upper ? 2 : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float const low = values[i], high = values[i + 2];
        float const given = __shfl_xor_sync(0xffffffffu, upper ? low : high, 1);
        __align__(4)
            T const pair[2] = {ptx::from_float<T>(upper ? given : low), ptx::from_float<T>(upper ? high : given)};
        if (k + i < chunks_of(four.width) * kChunk) {
            *reinterpret_cast<uint32_t*>(args.image + pair_offset<kTokens>(k + i, four.token)) =
                *reinterpret_cast<uint32_t const*>(pair);
        }
    }
    count(args.counts.image + part * kPartColumns / kChunk);
}

// A part of a row behind `layer`, as T would hold it.
template <typename T, int kTokens>
__device__ __forceinline__ void finish_part(MlpArgs<T> const& args, int layer, FourColumns<T> const& four, int part,
                                            float (&values)[4]) {
    GemmArgs<T> const& down = args.down;
    float bias[4], x[4] = {};
    four.load(down.bias + static_cast<int64_t>(layer) * four.width, bias);
    if (args.residual) four.load((layer == 0 ? args.x : args.y) + static_cast<int64_t>(four.token) * four.width, x);
    float const scale = down.tensor_scale[layer] * static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
    await_count(args.counts.partials + part * kPartColumns / kTileRows, (layer + 1u) * (down.split.splits * kWarps));
    sum_parts<T, kTokens>(down, four.token, four.column, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = ptx::to_float(ptx::from_float<T>(fmaf(values[i], scale, bias[i]) + x[i]));
    }
}

// The rows behind `layer`, or, of -1, in front of layer 0: y, and the image of the next layer's x. A warp does a part
// of a token's row at a time.
template <typename T, int kTokens>
__device__ void do_rows(MlpArgs<T> const& args, int layer) {
    bool const first = layer < 0;
    bool const last = layer + 1 == args.layers;
    bool const norm = args.norm_weight != nullptr;
    int const width = first ? args.up.k : args.down.rows;
    int const parts = parts_of(width);
    for_parts<T>(args.up.m, width, [&](FourColumns<T> const& four, int part) {
        float values[4];
        if (first) {
            four.load(args.x + static_cast<int64_t>(four.token) * width, values);
        } else {
            finish_part<T, kTokens>(args, layer, four, part, values);
            if (last || args.residual || norm) four.store(args.y, values);
        }
        if (last) return;
        if (!norm) {
            store_image<T, kTokens>(args, four, part, values);
            return;
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) squares = fmaf(values[i], values[i], squares);
        squares = ptx::warp_sum(squares);
        if (threadIdx.x % 32 == 0) args.squares[four.token * parts + part] = squares;
        count(args.counts.squares + four.token);
    });
    if (last || !norm) return;
    // Once this warp's part of every row is counted: other warps await it.
    for_parts<T>(args.up.m, width, [&](FourColumns<T> const& four, int part) {
        float values[4], weight[4];
        four.load((first ? args.x : args.y) + static_cast<int64_t>(four.token) * width, values);
        four.load(args.norm_weight + static_cast<int64_t>(layer + 1) * width, weight);
        await_count(args.counts.squares + four.token, (layer + 2u) * parts);
        float total = 0.0f;
        for (int i = threadIdx.x % 32; i < parts; i += 32) total += __ldcg(args.squares + four.token * parts + i);
        total = ptx::warp_sum(total);
        float const inverse_rms = 1.0f / sqrtf(total / static_cast<float>(width) + args.epsilon);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] *= inverse_rms * weight[i];
        store_image<T, kTokens>(args, four, part, values);
    });
}

// Where a warp is in its ring and in the panels.
struct Places {
    w4a16::RingPosition ring;
    int panel = 0;
    uint32_t parity = 0;
};

// One phase's tasks: the products of a warp, finished.
template <typename T, int kTokens>
__device__ __forceinline__ void multiply_phase(MlpArgs<T> const& args, MlpShared<kTokens>& shared,
                                               w4a16::Rings const& rings, Places& at, int phase, int first, int step) {
    GemmArgs<T> const& gemm = gemm_of(args, phase);
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    WarpRows const rows(warp, gemm.gated && gemm.image != nullptr);
    Turned& turned = shared.turned[warp];
    uint64_t const panels = ptx::matrix_descriptor(ptx::shared_address(shared.panels[0]), kTokens * 16, 128);
    uint32_t const own_byte = 0x4040u | lane % 4 * 0x0101u;  // selects scale t of four, in both halves
    int const tasks = gemm.split.tasks(gemm.rows);
    auto const release = [&](int which) {
        if (lane < gemm.split.cluster) ptx::mbarrier_arrive_at(ptx::shared_address(&shared.empty[which]), lane);
    };
#pragma unroll 1
    for (int index = first; index < tasks; index += step) {
        Task const task(gemm.split, chunks_of(gemm.k), index);
        Epilogue<T, kTokens> epilogue(gemm, rows, task, phase / 2);
        int finished = -1;  // the panel whose multiplications may still be under way
        float acc[2][kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
            if (chunk + 1 == task.end) epilogue.load();
            uint8_t const* const stage = rings.acquire(warp, at.ring);
#pragma unroll
            for (int group = 0; group < kChunk / kGroup; ++group) {
                constexpr int kGroupsPerPanel = kPanelK / kGroup;
                Codes const codes = load_group(stage, group);
                if (group == kChunk / kGroup - 1) rings.release(warp, at.ring);
                if (group % kGroupsPerPanel == 0) {
                    ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.panel]), at.parity);
                }
                uint64_t const b =
                    ptx::advance(panels, at.panel * kPanelBytes<kTokens> +
                                             group % kGroupsPerPanel * (kPanelBytes<kTokens> / kGroupsPerPanel));
                multiply_group<T, kTokens>(codes, own_byte, gemm.one, b, acc, [&](int word) {
                    // All but this word's have finished: the panel before is free.
                    if (word == 0 && group % kGroupsPerPanel == 0 && finished >= 0) release(finished);
                });
                if (group % kGroupsPerPanel == kGroupsPerPanel - 1) {
                    finished = at.panel;
                    if (++at.panel == kPanels<kTokens>) {
                        at.panel = 0;
                        at.parity ^= 1;
                    }
                }
            }
        }
        ptx::wgmma_wait<0>();
        release(finished);
        finish_task<T, kTokens>(epilogue, acc, turned);
        if (gemm.image != nullptr) {
            int const chunk = task.tile / tiles_per_hidden_chunk(gemm);
            if (chunk < chunks_of(args.down.k)) count(args.counts.hidden + chunk);
        } else {
            count(args.counts.partials + task.tile);
        }
    }
}

template <typename T, int kTokens>
__global__ __launch_bounds__(kMlpThreads, 1) void sm90_w4a16_mlp(__grid_constant__ MlpArgs<T> const args) {
    extern __shared__ __align__(128) uint8_t bytes[];
    auto& shared = *reinterpret_cast<MlpShared<kTokens>*>(bytes);
    int const cluster = args.up.split.cluster;
    int const first = blockIdx.x / cluster;
    int const step = gridDim.x / cluster;
    // Uniform to the compiler too, which then keeps what all lanes share in uniform registers.
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    w4a16::Rings const rings{shared.weights[0][0], shared.rings, kMlpStages};
    if (threadIdx.x % 32 == 0 && warp < kWarps) rings.init(warp);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kPanels<kTokens>; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), kWarps * cluster);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::cluster_meet();
    if (warp < kWarps) {
        // 208 and 88 of the 168 that each of the three warpgroups starts with.
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        Places at;
#pragma unroll 1
        for (int layer = -1; layer < args.layers; ++layer) {
#pragma unroll 1
            for (int phase = max(2 * layer, 0); phase < 2 * layer + 2; ++phase) {
                multiply_phase<T, kTokens>(args, shared, rings, at, phase, first, step);
            }
            do_rows<T, kTokens>(args, layer);
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        if (warp < kWarps + kFillers) {
            fill_phases(args, rings, warp - kWarps, first, step);
        } else if (warp == kWarps + kFillers) {
            bring_panels<T, kTokens>(args, shared, first, step);
        }
    }
    // No block may end while another's copies and arrivals reach its shared memory.
    __syncwarp();
    ptx::cluster_meet();
}

}  // namespace trt_nvfp4::sm90
