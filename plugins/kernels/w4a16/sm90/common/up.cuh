// What the sums of gate and up become, in MLPs and mixtures: hidden values, and where they lie.
#pragma once

#include "common/smooth_activation.cuh"
#include "w4a16/sm90/mlp/rows.cuh"

namespace trt_nvfp4::sm90 {

// A lane's hidden values of kColumns times 8 tokens: with gates 4 of a token in each column, else 4 of each of two.
template <int kColumns>
struct HiddenValues {
    float values[8 * kColumns];
    int k, token;  // of the first
    bool gated;

    // Behind the last row of a layer, or an expert, lies the next one's first.
    __device__ __forceinline__ void zero_from(int width) {
        if (gated) {
#pragma unroll
            for (int i = 0; i < 4 * kColumns; ++i) values[i] = k + i % 4 * 16 < width ? values[i] : 0.0f;
        } else {
#pragma unroll
            for (int i = 0; i < 8 * kColumns; ++i) values[i] = k + i % 8 / 2 * 32 < width ? values[i] : 0.0f;
        }
    }

    // Calls f(offset, value) with where a value lies, in bytes, by a Layout: addresses of a column's first value, and
    // what is known of the others.
    template <class Layout, typename F>
    __device__ __forceinline__ void each(F&& f) const {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            uint32_t const first = Layout::offset(k, token + column * 8);
            if (gated) {
                // k lies in its group's first block.
#pragma unroll
                for (int i = 0; i < 4; ++i) f(first + i * Layout::kBlockBytes, values[column * 4 + i]);
            } else {
                // In its first two.
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    uint32_t const block = first + i / 2 % 2 * (2 * Layout::kBlockBytes) + i / 4 * Layout::kGroupBytes;
                    f(block + i % 2 * Layout::kTokenBytes, values[column * 8 + i]);
                }
            }
        }
    }
};

// What a lane adds to its sums of up: of each quarter the bias of its row, or with gates those of gate and up, side by
// side. Nothing is done with it before it is needed: that would wait for memory.
template <typename T>
struct UpEpilogue {
    float tensor_scale;
    uint32_t bias[kQuarters];

    // Row of quarter 0 whose value this lane has; of a gate and its up, the gate's.
    static __device__ __forceinline__ int first_row(bool gated, int tile) {
        int const row = tile * kTileRows + threadIdx.x / 128 * kGroupRows + row_of_lane();
        return gated ? row - row % 2 : row;
    }
    __device__ __forceinline__ void load(Projection<T> const& up, int layer, int tile) {
        tensor_scale = up.tensor_scale[layer];
        T const* const all = up.bias + static_cast<int64_t>(layer) * up.rows;
#pragma unroll
        for (int i = 0; i < kQuarters; ++i) {
            int const row = first_row(up.gated, tile) + i * 32;
            bias[i] = 0;
            if (row >= up.rows) continue;
            bias[i] = up.gated ? *reinterpret_cast<uint32_t const*>(all + row)
                               : *reinterpret_cast<uint16_t const*>(all + row);
        }
    }

    // What the sums of kColumns times 8 tokens become, of quarters 0 to 3 for the first of a lane's two and the second.
    // Their places are within the tile.
    template <int kColumns>
    __device__ __forceinline__ HiddenValues<kColumns> finish(Projection<T> const& up,
                                                             float const (&sums)[8 * kColumns]) const {
        HiddenValues<kColumns> hidden;
        hidden.gated = up.gated;
        hidden.token = threadIdx.x % 4 * 2;
        if (up.gated) {
            // Lanes 16 apart have gates and ups: each takes one token's.
            int const which = threadIdx.x / 16 % 2;
#pragma unroll
            for (int i = 0; i < 4 * kColumns; ++i) {
                float const kept = which == 0 ? sums[2 * i] : sums[2 * i + 1];
                float const got = __shfl_xor_sync(0xffffffffu, which == 0 ? sums[2 * i + 1] : sums[2 * i], 16);
                hidden.values[2 * i] = which == 0 ? kept : got;
                hidden.values[2 * i + 1] = which == 0 ? got : kept;
            }
            add_bias<2>(hidden.values);
            gate_values(up.activation, up.alpha, up.limit, hidden.values);
            hidden.k = first_row(true, 0) / 2;
            hidden.token += which;
        } else {
#pragma unroll
            for (int i = 0; i < 8 * kColumns; ++i) hidden.values[i] = sums[i];
            add_bias<1>(hidden.values);
            activate_values(up.activation, hidden.values);
            hidden.k = first_row(false, 0);
        }
        return hidden;
    }

 private:
    // Two values of each quarter, which take turns with kBiases.
    template <int kBiases, int kValues>
    __device__ __forceinline__ void add_bias(float (&values)[kValues]) const {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            T const* const own = reinterpret_cast<T const*>(&bias[i % 8 / 2]);
            values[i] = fmaf(values[i], value_scale<T>(tensor_scale), ptx::to_float(own[i % kBiases]));
        }
    }
};

}  // namespace trt_nvfp4::sm90
