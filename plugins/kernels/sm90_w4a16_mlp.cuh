// y = MLP layers of x for up to 64 tokens on SM90, in one launch of blocks that are all resident, two to a cluster, so
// that weights stay on their way from phase to phase.
//
// A layer: up, which writes the image of the hidden values; down, whose K is split, which writes partial sums; rows
// (sm90_w4a16_mlp_rows.cuh), which adds them up and writes the next layer's image. What a phase reads, the one before
// it has written: chunks of K, and tiles of down, count what has been written of them, and who reads them awaits the
// count; values of up to 8 tokens say so themselves. Each phase needs all of the one before, directly or through the
// next, so that nothing is overwritten while it is read.
//
// Two warpgroups multiply and do the rows: by mma.sync up to 16 tokens, by wgmma beyond. Of a third, which leaves them
// its registers, one thread fetches weights and other warps panels of activations (sm90_w4a16_mlp_panels.cuh).
#pragma once

#include "ptx/grid.cuh"
#include "sm90_w4a16_mlp_panels.cuh"
#include "sm90_w4a16_mlp_rows.cuh"
#include "sm90_w4a16_task.cuh"

namespace trt_nvfp4::sm90 {

// By one thread.
template <typename T>
__device__ __forceinline__ void fetch_weights(MlpArgs<T> const& args, WeightSlots& slots) {
    ptx::prefetch(args.up.maps.codes);
    ptx::prefetch(args.up.maps.scales);
    ptx::prefetch(args.down.maps.codes);
    ptx::prefetch(args.down.maps.scales);
    SlotFiller filler(slots);
    for_tasks(args, 0, 2 * args.layers, [&](int phase, Projection<T> const& matrix, Task const& task) {
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
#pragma unroll 1
            for (int i = 0; i < kWarpgroups; ++i) {
                filler.fill(matrix.maps, phase / 2, task.tile * kWarpgroups + i, chunk);
            }
        }
    });
}

// A lane's hidden values of a column of tokens: with gates 4 of a token, else 4 of each of two.
struct HiddenValues {
    float values[8];
    int k, token;  // of the first
    bool gated;

    // Behind the last row of a layer, or an expert, lies the next one's first.
    __device__ __forceinline__ void zero_from(int width) {
        if (gated) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = k + i * 16 < width ? values[i] : 0.0f;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = k + i / 2 * 32 < width ? values[i] : 0.0f;
        }
    }

    // Calls f(offset, value) with where a value lies in an image of kTokens, in bytes: one address, and what is known
    // of the others.
    template <int kTokens, typename F>
    __device__ __forceinline__ void each(F&& f) const {
        int64_t const first = value_offset<kTokens>(k, token);
        if (gated) {
            // k lies in its group's first block.
#pragma unroll
            for (int i = 0; i < 4; ++i) f(first + i * 4, values[i]);
        } else {
            // In its first two.
#pragma unroll
            for (int i = 0; i < 8; ++i)
                f(first + i / 2 % 2 * 8 + i / 4 * (kGroup * 2 * kTokens) + i % 2 * 16, values[i]);
        }
    }
};

// What a lane adds to its sums of up: of quarter i / 2 the bias of its row, or with gates of its gate and up rows.
// Nothing is done with it before it is needed: that would wait for memory.
template <typename T>
struct UpEpilogue {
    float tensor_scale;
    T bias[8];

    // Row of quarter 0 whose value this lane has; of a gate and its up, the gate's.
    static __device__ __forceinline__ int first_row(bool gated, int tile) {
        int const row = tile * kTileRows + threadIdx.x / 128 * kGroupRows + row_of_lane();
        return gated ? row - row % 2 : row;
    }
    __device__ __forceinline__ void load(Projection<T> const& up, int layer, int tile) {
        tensor_scale = up.tensor_scale[layer];
        T const* const all = up.bias + static_cast<int64_t>(layer) * up.rows;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const row = first_row(up.gated, tile) + i / 2 * 32 + (up.gated ? i % 2 : 0);
            bias[i] = row < up.rows ? all[row] : ptx::from_float<T>(0.0f);
        }
    }

    // What the sums of 8 tokens, of quarters 0 to 3 for the first of a lane's two and the second, become.
    __device__ __forceinline__ HiddenValues finish(Projection<T> const& up, int tile, int column,
                                                   float const (&sums)[8]) const {
        HiddenValues hidden;
        hidden.gated = up.gated;
        hidden.token = column * 8 + threadIdx.x % 4 * 2;
        if (up.gated) {
            // Lanes 16 apart have gates and ups: each takes one token's.
            int const which = threadIdx.x / 16 % 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float const kept = which == 0 ? sums[2 * i] : sums[2 * i + 1];
                float const got = __shfl_xor_sync(0xffffffffu, which == 0 ? sums[2 * i + 1] : sums[2 * i], 16);
                hidden.values[2 * i] = which == 0 ? kept : got;
                hidden.values[2 * i + 1] = which == 0 ? got : kept;
            }
            add_bias(hidden.values);
            gate_eight(up.activation, up.alpha, up.limit, hidden.values);
            hidden.k = first_row(true, tile) / 2;
            hidden.token += which;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) hidden.values[i] = sums[i];
            add_bias(hidden.values);
            activate_eight(up.activation, hidden.values);
            hidden.k = first_row(false, tile);
        }
        return hidden;
    }

 private:
    __device__ __forceinline__ void add_bias(float (&values)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] = fmaf(values[i], value_scale<T>(tensor_scale), ptx::to_float(bias[i]));
        }
    }
};

template <typename T, int kTokens>
__device__ __forceinline__ void multiply_phases(MlpArgs<T> const& args, MlpShared<T, kTokens>& shared, Places& at,
                                                int first_phase, int end_phase) {
    int const warp = threadIdx.x / 32;
    for_tasks(args, first_phase, end_phase, [&](int phase, Projection<T> const& matrix, Task const& task) {
        float acc[2][kTokens / 2];
        int const layer = phase / 2;
        bool const up = phase % 2 == 0;
        UpEpilogue<T> epilogue;
        if (up) epilogue.load(matrix, layer, task.tile);
        multiply_task<T, kTokens>(shared.task, task, args.one, at, acc);
        if (up) {
#pragma unroll 1
            for (int column = 0; column < kTokens / 8; ++column) {
                float sums[8];
                column_sums<kTokens>(acc, column, sums);
                HiddenValues hidden = epilogue.finish(matrix, task.tile, column, sums);
                if (hidden.k >= matrix.padded_width) continue;
                if ((task.tile + 1) * kTileRows > matrix.rows) hidden.zero_from(args.down.k);
                uint8_t* const image = args.down.x_of(layer);
                hidden.each<kTokens>(
                    [&](int64_t offset, float value) { store_value<T, kTokens>(image + offset, value); });
            }
            if (kValuesAreFlags<kTokens>) return;
            publish<32 * kWarps>([&] {
                int const chunk = task.tile / matrix.tiles_per_chunk();
                if (chunk < chunks_of(args.down.k)) count(args.counts.hidden + chunk);
            });
        } else {
#pragma unroll
            for (int quarter = 0; quarter < kQuarters; ++quarter) {
#pragma unroll
                for (int column = 0; column < kTokens / 8; ++column) {
                    float const* const sums = &acc[quarter / 2][column * 4 + quarter % 2 * 2];
                    float2* const destination = partial<T, kTokens>(args, task.part, task.tile, warp, quarter, column);
                    if (kValuesAreFlags<kTokens>) {
                        store_sums(destination, {with_parity(sums[0], layer), with_parity(sums[1], layer)});
                    } else {
                        *destination = make_float2(sums[0], sums[1]);
                    }
                }
            }
            if (kValuesAreFlags<kTokens>) return;
            publish<32 * kWarps>([&] { count(args.counts.partials + task.tile * kCountStep); });
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
    ptx::cluster_meet();
    if (warp < kWarps) {
        take_registers();
        Places at;
#pragma unroll 1
        for (int layer = -1; layer < args.layers; ++layer) {
            multiply_phases<T, kTokens>(args, shared, at, max(2 * layer, 0), 2 * layer + 2);
            do_rows<T, kTokens>(args, layer);
        }
    } else {
        give_registers();
        if (threadIdx.x == 32 * kWarps) {
            fetch_weights(args, shared.task.weights);
        } else if constexpr (kValuesAreFlags<kTokens>) {
            if (warp > kWarps) stage_activations<T, kTokens>(args, shared, warp - kWarps - 1);
        } else if (warp == kWarps + 1) {
            fetch_activations<T, kTokens>(args, shared);
        }
    }
    // No block may end while another's copies and arrivals reach its shared memory.
    __syncwarp();
    ptx::cluster_meet();
}

}  // namespace trt_nvfp4::sm90
