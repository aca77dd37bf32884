// y = MLP layers of x for up to 64 tokens on SM90, in one launch of blocks that are all resident, two to a cluster, so
// that weights stay in flight from phase to phase.
//
// A layer: up, which writes the hidden values; down, whose K is split, which writes partial sums; rows
// (sm90/mlp/rows.cuh), which adds them up and writes the next layer's x.
//
// What blocks exchange (exchange/). The launch before, sm90_w4a16_erase, resets sentinels, parities and counts:
//
//     buffer        writer     readers      published by             what must precede an overwrite
//     up.x_of(l)    rows(l-1)  up(l)        sentinels up to 16       sentinels: a place for each layer; counts: x(l+1)
//                                           tokens, else             needs all of down(l), which needs all of up(l)
//                                           counts.image
//     down.x_of(l)  up(l)      down(l)      the same, with           the same: hidden(l+1) needs all of rows(l), which
//                                           counts.hidden            need all of down(l)
//     partials      down(l)    rows(l)      parity of l              down(l+1) needs all of up(l+1), so all of rows(l)
//     squares       rows(l)    rows(l)      parity of l+1, beyond    rows(l+1) need all of up(l+1), so all rows(l) that
//                                           16 tokens counts.squares have been normalized
//     y             rows(l)    rows(l+1)    -                        the thread that writes a value is its only reader
//
// Two consumer warpgroups multiply and do the rows: one token as integers, up to 8 by mma.sync, more by wgmma. In the
// producer warpgroup, which leaves them its registers, one thread copies weights and other warps copy tiles of
// activations (sm90/mlp/activations.cuh).
#pragma once

#include "ptx/elect.cuh"
#include "ptx/grid.cuh"
#include "w4a16/sm90/common/task.cuh"
#include "w4a16/sm90/common/up.cuh"
#include "w4a16/sm90/mlp/activations.cuh"
#include "w4a16/sm90/mlp/rows.cuh"

namespace trt_nvfp4::sm90 {

// Chunks of a task whose weights are copied before its first activations are there, in MlpArgs::ahead stages at once.
// There is room for more, but exchanges between blocks, and each fence, would queue behind the copies.
constexpr int kChunksAhead = 3;

// By one thread.
template <typename T, int kTokens>
__device__ __forceinline__ void fetch_weights(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared) {
    ptx::prefetch(args.up.maps.codes);
    ptx::prefetch(args.up.maps.scales);
    ptx::prefetch(args.down.maps.codes);
    ptx::prefetch(args.down.maps.scales);
    StageProducer producer(shared.task.weights);
    uint32_t tasks = 0;
    for_tasks(args, 0, 2 * args.layers, [&](int phase, Projection<T> const& matrix, Task const& task) {
        ++tasks;
        TileBoxes const tile(matrix.maps, phase / 2, task.tile);
        int const held = task.begin + kChunksAhead;
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
            if (chunk == held) shared.await_tasks(tasks);
#pragma unroll
            for (int i = 0; i < kWarpgroups; ++i)
                producer.fill(tile, i, chunk, chunk < held ? args.ahead : kWeightStages);
        }
    });
}

// Hidden values of kTokens in flight to an image through shared memory, [scale blocks of a group, units, tokens]
// pairs of values, so that lanes meet in no bank: neither those that have a scale block of eight tokens and four units,
// nor those that have a unit's tokens.
template <int kTokens, bool kNeighbours>
struct StagedLayout {
    static constexpr int kTokenBytes = 4, kUnitBytes = kTokens * kTokenBytes;
    static constexpr int kGroupBytes = kGroup / 8 * kUnitBytes, kBlockBytes = kTileRows / 8 * kUnitBytes;

    static __device__ __forceinline__ uint32_t pair(uint32_t unit, uint32_t token) {
        return unit * kUnitBytes + (token ^ (unit * (kTokens / 4) & (kTokens - 8))) * kTokenBytes;
    }
    static __device__ __forceinline__ uint32_t offset(uint32_t k, uint32_t token) {
        return pair(unit_of<kNeighbours>(k), token) + k % kGroup / 16 * kBlockBytes + half_of<kNeighbours>(k);
    }
    // A token's unit.
    static __device__ __forceinline__ uint4 load(uint8_t const* values, uint32_t unit, uint32_t token) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = *reinterpret_cast<uint32_t const*>(values + pair(unit, token) + i * kBlockBytes);
        }
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
};

// A tile's sums of up become hidden values, which go to their image through shared memory, so that whole lines are
// written.
template <typename T, int kTokens>
__device__ __forceinline__ void finish_up(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared, int layer, int tile,
                                          UpEpilogue<T> const& epilogue, float (&acc)[2][kSumTokens<kTokens> / 2]) {
    Projection<T> const& up = args.up;
    int const width = kTileRows / (up.gated ? 2 : 1);
    if (tile * width >= up.padded_width) return;
    auto* const image = reinterpret_cast<uint4*>(args.down.x_of(layer) + int64_t{2} * tile * width * kTokens);
    constexpr int kStaged = kStagedTokens<kTokens>, kStored = std::min(kStaged, kTokens);
    using Layout = StagedLayout<kStaged, kTokens == 1>;
    // All at once, so that a column's instructions fill the others' gaps.
    constexpr int kColumns = kStaged / 8;
#pragma unroll 1
    for (int first = 0; first < kTokens; first += kStaged) {
        if (first > 0) ptx::sync_warps<32 * kWarps>();
        float sums[8 * kColumns];
        take_columns<kColumns>(acc, sums);
        HiddenValues<kColumns> hidden = epilogue.template finish<kColumns>(up, sums);
        if ((tile + 1) * kTileRows > up.rows) hidden.zero_from(args.down.k - tile * width);
        hidden.template each<Layout>([&](uint32_t offset, float value) {
            *reinterpret_cast<T*>(shared.staged + offset) = ptx::from_float<T>(value);
        });
        ptx::sync_warps<32 * kWarps>();
#pragma unroll
        for (int i = threadIdx.x; i < kTileRows / 8 * kStored; i += 32 * kWarps) {
            if (i >= width / 8 * kStored) break;
            int const unit = i / kStored, token = i % kStored;
            w4a16::store_eight(image + unit * kTokens + first + token, Layout::load(shared.staged, unit, token));
        }
    }
    if constexpr (kValuesAreFlags<kTokens>) {
        ptx::sync_warps<32 * kWarps>();  // before the next tile's are staged
    } else {
        publish<32 * kWarps>([&] { count(args.counts.hidden + tile / up.tiles_per_chunk()); });
    }
}

template <typename T, int kTokens>
__device__ __forceinline__ void multiply_phases(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared,
                                                Places<MlpTaskShared<T, kTokens>>& at, int first_phase, int end_phase) {
    int const warp = threadIdx.x / 32;
    for_tasks(args, first_phase, end_phase, [&](int phase, Projection<T> const& matrix, Task const& task) {
        constexpr int kColumns = kSumTokens<kTokens> / 8;
        float acc[2][4 * kColumns];
        int const layer = phase / 2;
        bool const up = phase % 2 == 0;
        UpEpilogue<T> epilogue;
        if (up) epilogue.load(matrix, layer, task.tile);
        multiply_task<T, kTokens>(task.end - task.begin, args.one, at, acc);
        if (up) {
            finish_up<T, kTokens>(args, shared, layer, task.tile, epilogue, acc);
        } else {
            PartialSums<T, kTokens> const partials(args);
            uint32_t const first = (task.tile * kWarps + warp) * kQuarters * kColumns;
#pragma unroll
            for (int i = 0; i < kQuarters * kColumns; ++i) {
                int const quarter = i / kColumns, column = i % kColumns;
                float const* const sums = &acc[quarter / 2][column * 4 + quarter % 2 * 2];
                store_parts(partials.of(first + i) + task.part * kPartStep, sums[0], sums[1], layer & 1);
            }
        }
    });
}

template <typename T, int kTokens>
__global__ __launch_bounds__(kTaskThreads, 1) void sm90_w4a16_mlp(__grid_constant__ MlpArgs<T> const args) {
    extern __shared__ __align__(1024) uint8_t mlp_bytes[];
    auto& shared = *reinterpret_cast<MlpShared<T, kTokens>*>(mlp_bytes);
    // Uniform to the compiler too, which then keeps what all lanes share in uniform registers.
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    ptx::cluster_sync();
    // The launch before erases what says whether something has been written. Weights do not wait for it.
    if (warp != kWarps) ptx::await_previous_launch();
    if (warp < kWarps) {
        take_registers<>();
        Places at(shared.task);
        Units<kTokens> units(args.columns, args.m, args.up.k);
#pragma unroll 1
        for (int layer = -1; layer < args.layers; ++layer) {
            multiply_phases<T, kTokens>(args, shared, at, max(2 * layer, 0), 2 * layer + 2);
            do_rows<T, kTokens>(args, layer, units);
            if (layer < 0) units = Units<kTokens>(args.columns, args.m, args.down.rows);
        }
    } else {
        give_registers<>();
        if (warp == kWarps) {
            if (ptx::elect()) fetch_weights(args, shared);
        } else if constexpr (kValuesAreFlags<kTokens>) {
            if (warp > kWarps) stage_activations<T, kTokens>(args, shared, warp - kWarps - 1);
        } else if (warp == kWarps + 1) {
            fetch_activations<T, kTokens>(args, shared);
        }
    }
    // No block may end while another's copies and arrivals reach its shared memory.
    __syncwarp();
    ptx::cluster_sync();
}

}  // namespace trt_nvfp4::sm90
