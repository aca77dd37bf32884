// y = MLP layers of x, or one linear, at up to 8 * kColumns tokens: weights stream once from global memory to the
// tensor cores (A operand), tokens are the columns. One block per SM; a launch of several phases needs all blocks
// co-resident.
//
// K's order inside a contraction is free. In a chunk of 256 values lane t of a row's four takes values 64t to 64t + 63:
// whole scale blocks, read in 16 bytes. Activations are staged in shared memory in the order that matches.
#pragma once

#include <type_traits>

#include "activation.cuh"
#include "programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/reduce.cuh"
#include "sm80_w4a16_decode.cuh"
#include "sm80_w4a16_exchange.cuh"
#include "sm80_w4a16_stream.cuh"

namespace trt_nvfp4::w4a16 {

// What surrounds one projection. Its output is [m, rows], or [m, rows / 2] when gated.
template <typename T>
struct Surroundings {
    T const* norm_weight;  // [layers, k]; null: no RMSNorm in front
    TrtNvfp4Activation activation;
    bool gated;
    bool residual;  // adds the layer's x
};

// A layer's x and hidden lie in rings, because a slow block may still read what the next layer would overwrite; see
// sm80_w4a16_mlp. All of it is absent before a launch.
constexpr int kXBuffers = 3;
constexpr int kHiddenBuffers = 2;

template <typename T, int kProjections>
struct MlpArgs {
    Program<kProjections> program;
    Surroundings<T> surroundings[kProjections];
    int layers, m;
    float epsilon, alpha, limit;
    T const* x;
    T* y;
    T* x_ring;                        // [kXBuffers, m, k], from layer 1 on
    T* hidden_ring;                   // [kHiddenBuffers, m, intermediate]
    Partial* partials[kProjections];  // [tiles, splits, m, kTileRows]
    SharedMemory shared;              // its panel holds a multiple of every k_groups
    uint32_t one;                     // 1, see shift_left
};

template <int kColumns>
using Accumulators = float[2][kColumns][4];

template <int kColumns>
constexpr int kPanelBytesPerChunk = kChunk * 8 * kColumns * 2;

// acc += this warp's tile of weights times a chunk of activations. Rows of lane 4g + t: g + {0, 32, 64, 96}.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_chunk(uint8_t const* stage, uint8_t const* panel, uint32_t one,
                                               Accumulators<kColumns>& acc) {
    int const lane = threadIdx.x % 32;
    int const g = lane / 4;
    int const t = lane % 4;
    uint4 const scales = *reinterpret_cast<uint4 const*>(stage + kCodeBytes + t * 128 + (g ^ (t * 2)) * 16);
    uint32_t const row_scales[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 codes[4];
        uint32_t scales_of[4];  // two blocks' each
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            codes[row] =
                *reinterpret_cast<uint4 const*>(stage + (row * 8 + g) * (kChunk / 2) + ((2 * t + half) ^ (g & 1)) * 16);
            scales_of[row] = Decoder<T>::scales(row_scales[row] >> half * 16, one);
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            uint32_t a[4][4];
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                uint4 const& c = codes[row];
                Decoder<T>::codes(word == 0 ? c.x : word == 1 ? c.y : word == 2 ? c.z : c.w, one, a[row]);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    a[row][pair] = word < 2 ? multiply_by_half<T, 0>(a[row][pair], scales_of[row])
                                            : multiply_by_half<T, 1>(a[row][pair], scales_of[row]);
                }
            }
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                uint4 const b =
                    *reinterpret_cast<uint4 const*>(panel + (((half * 4 + word) * kColumns + column) * 32 + lane) * 16);
                // Neighbours in this order belong to different accumulators, so that none waits for the one before.
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto const& top = a[2 * i];
                    auto const& bottom = a[2 * i + 1];
                    ptx::mma_m16n8k16<T>(acc[i][column], top[0], bottom[0], top[1], bottom[1], b.x, b.y);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto const& top = a[2 * i];
                    auto const& bottom = a[2 * i + 1];
                    ptx::mma_m16n8k16<T>(acc[i][column], top[2], bottom[2], top[3], bottom[3], b.z, b.w);
                }
            }
        }
    }
}

// 1 / rms of every token's x, for the norm in front of a projection.
template <typename T>
__device__ void inverse_rms(T const* x, bool awaited, int m, int k, float epsilon, float* out) {
    for (int token = threadIdx.x / 32; token < m; token += kWarps) {
        float squares = 0.0f;
        for (int i = threadIdx.x % 32; i < k / 8; i += 32) {
            T const* const source = x + static_cast<int64_t>(token) * k + i * 8;
            uint4 eight = load_eight(source);
            while (awaited && has_absent(eight)) eight = load_eight(source);
            T const* const values = reinterpret_cast<T const*>(&eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = fmaf(ptx::to_float(values[j]), ptx::to_float(values[j]), squares);
        }
        squares = ptx::warp_sum(squares);
        if (threadIdx.x % 32 == 0) out[token] = 1.0f / sqrtf(squares / static_cast<float>(k) + epsilon);
    }
    __syncthreads();
}

template <typename T>
__device__ __forceinline__ uint4 normalize(uint4 eight, T const* weight, float inverse_rms) {
    T* const values = reinterpret_cast<T*>(&eight);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        values[j] = ptx::from_float<T>(ptx::to_float(values[j]) * inverse_rms * ptx::to_float(weight[j]));
    }
    return eight;
}

// Activations of chunks [begin, end) to the panel as they appear: 16 bytes are eight values of a token, see
// multiply_chunk. Places of tokens above m keep the zeros of the kernel's start.
template <typename T, int kColumns>
__device__ void stage_activations(T const* x, bool awaited, int m, int k, int begin, int end, T const* norm_weight,
                                  float const* inverse_rms, uint8_t* panel) {
    constexpr int kBatch = 8;
    int const lane = threadIdx.x % 32;
    int const t = lane / 2 % 4;
    int const word = lane / 8 * 2 + lane % 2;
    int const rows = (end - begin) * m;
    int chunk = threadIdx.x / 32 / m;
    int token = threadIdx.x / 32 % m;
    int const chunk_step = kWarps / m;
    int const token_step = kWarps % m;
    for (int first = threadIdx.x / 32; first < rows; first += kWarps * kBatch) {
        uint4 eights[kBatch];
        int chunks[kBatch], tokens[kBatch];
        auto const offset = [&](int i) { return (begin + chunks[i]) * kChunk + t * 64 + word * 8; };
        auto const source = [&](int i) { return x + static_cast<int64_t>(tokens[i]) * k + offset(i); };
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            chunks[i] = chunk;
            tokens[i] = token;
            chunk += chunk_step;
            token += token_step;
            if (token >= m) {
                token -= m;
                ++chunk;
            }
            eights[i] = make_uint4(0u, 0u, 0u, 0u);
            if (first + i * kWarps < rows && offset(i) < k) eights[i] = load_eight(source(i));
        }
        // All at once: a trip to L2 per value that is late would add up.
        for (bool absent = awaited; absent;) {
            absent = false;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (!has_absent(eights[i])) continue;
                eights[i] = load_eight(source(i));
                absent = true;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kWarps >= rows) break;
            if (norm_weight != nullptr && offset(i) < k) {
                eights[i] = normalize(eights[i], norm_weight + offset(i), inverse_rms[tokens[i]]);
            }
            int const slot = (word * kColumns + tokens[i] / 8) * 32 + tokens[i] % 8 * 4 + t;
            *reinterpret_cast<uint4*>(panel + chunks[i] * kPanelBytesPerChunk<kColumns> + slot * 16) =
                pair_activations<T>(eights[i]);
        }
    }
}

// Accumulators of eight tokens turned so that a lane holds a row of the tile: row lane % 8 of quarter lane / 8.
constexpr int kTurnPitch = kTileRows + 4;  // keeps the writes free of bank conflicts
using Turned = float[8][kTurnPitch];

__device__ __forceinline__ void turn(float const (&top)[4], float const (&bottom)[4], Turned& turned) {
    int const g = threadIdx.x % 32 / 4;
    int const token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        turned[token + i][g] = top[i];
        turned[token + i][8 + g] = top[2 + i];
        turned[token + i][16 + g] = bottom[i];
        turned[token + i][24 + g] = bottom[2 + i];
    }
}

// Calls f with the activation as a compile-time constant, so that what f does for many values shares one branch.
template <typename F>
__device__ __forceinline__ void with_activation(TrtNvfp4Activation activation, F&& f) {
    switch (activation) {
#define TRT_NVFP4_CASE(name)                                   \
    case name:                                                 \
        f(std::integral_constant<TrtNvfp4Activation, name>{}); \
        break;
        TRT_NVFP4_CASE(TRT_NVFP4_IDENTITY)
        TRT_NVFP4_CASE(TRT_NVFP4_RELU)
        TRT_NVFP4_CASE(TRT_NVFP4_RELU2)
        TRT_NVFP4_CASE(TRT_NVFP4_SILU)
        TRT_NVFP4_CASE(TRT_NVFP4_GELU)
        TRT_NVFP4_CASE(TRT_NVFP4_GELU_TANH)
        TRT_NVFP4_CASE(TRT_NVFP4_GELU_QUICK)
        TRT_NVFP4_CASE(TRT_NVFP4_SWIGLU_CLAMPED)
#undef TRT_NVFP4_CASE
    }
}

// Scale, bias, activation and residual: lane 4i + q does the eight rows of quarter q of a tile, for a token. The small
// operands are read when the tile is opened, long before they are needed.
template <typename T>
class Epilogue {
 public:
    template <int kProjections>
    __device__ Epilogue(MlpArgs<T, kProjections> const& args, int which, int layer, int tile, T const* x, T* out)
        : around_(args.surroundings[which]),
          rows_(args.program.projections[which].rows),
          row_(tile / kTilesPerGroup * 128 + threadIdx.x % 4 * 32 + tile % kTilesPerGroup * 8),
          alpha_(args.alpha),
          limit_(args.limit),
          x_(x),
          out_(out) {
        Projection const& p = args.program.projections[which];
        T const* const bias = static_cast<T const*>(p.bias) + static_cast<int64_t>(layer) * rows_ + row_;
        tensor_scale_ = p.tensor_scale[layer];
#pragma unroll
        for (int i = 0; i < 8; ++i) bias_[i] = row_ + i < rows_ ? bias[i] : ptx::from_float<T>(0.0f);
    }

    __device__ __forceinline__ void write(int token, float const (&sums)[8]) const {
        float const scale = tensor_scale_ * static_cast<float>(1 << Decoder<T>::kScaleShift);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = fmaf(sums[i], scale, ptx::to_float(bias_[i]));
        int const width = around_.gated ? rows_ / 2 : rows_;
        int const count = around_.gated ? 4 : 8;
        int const column = around_.gated ? row_ / 2 : row_;
        int64_t const at = static_cast<int64_t>(token) * width + column;
        with_activation(around_.activation, [&](auto constant) {
            constexpr TrtNvfp4Activation kActivation = decltype(constant)::value;
            if (around_.gated) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    values[i] = gated_activate(kActivation, values[2 * i], values[2 * i + 1], alpha_, limit_);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = activate(kActivation, values[i]);
            }
        });
        if (around_.residual) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (column + i < width) values[i] += ptx::to_float(__ldcg(x_ + at + i));
            }
        }
        T rounded[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded[i] = ptx::from_float<T>(values[i]);
        if (width % 4 == 0) {
            Four const* const fours = reinterpret_cast<Four const*>(rounded);
            if (column < width) store_four(out_ + at, fours[0]);
            if (count == 8 && column + 4 < width) store_four(out_ + at + 4, fours[1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count && column + i < width) out_[at + i] = rounded[i];
        }
    }

 private:
    Surroundings<T> const& around_;
    int const rows_, row_;
    float const alpha_, limit_;
    T const* const x_;
    T* const out_;
    float tensor_scale_;
    T bias_[8];
};

// Adds up what the k_groups warps of a tile have of eight tokens, in their order, and finishes it or publishes it as a
// part. The warps take the columns of eight tokens in turn.
template <typename T, int kProjections>
__device__ __forceinline__ void finish_column(MlpArgs<T, kProjections> const& args, Epilogue<T> const& epilogue,
                                              WarpTask const& task, int phase, int column, float const (&top)[4],
                                              float const (&bottom)[4], Turned* turned) {
    Projection const& p = args.program.projections[phase % kProjections];
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    if (p.split.k_groups > 1) __syncthreads();
    __syncwarp();
    turn(top, bottom, turned[warp]);
    __syncwarp();
    if (p.split.k_groups > 1) __syncthreads();
    int const token = column * 8 + lane / 4;
    if (task.tile >= p.tiles() || column % p.split.k_groups != task.k_group || token >= args.m) return;
    float sums[8] = {};
    for (int group = 0; group < p.split.k_groups; ++group) {
        float const* const row = &turned[warp - task.k_group + group][lane / 4][lane % 4 * 8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] += row[i];
    }
    if (p.split.splits == 1) {
        epilogue.write(token, sums);
        return;
    }
    Partial* const parts =
        args.partials[phase % kProjections] +
        ((static_cast<int64_t>(task.tile) * p.split.splits + task.split) * args.m + token) * kTileRows + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) store_partial(parts + i, sums[i], phase);
}

// Sums the parts of split tiles in their order, whoever computed them, and finishes them: a token of a tile per warp.
template <typename T, int kProjections>
__device__ void finish_split_tiles(MlpArgs<T, kProjections> const& args, int phase, int blocks, T const* x, T* out,
                                   Turned& turned) {
    int const which = phase % kProjections;
    Projection const& p = args.program.projections[which];
    int const lane = threadIdx.x % 32;
    int const units = p.tiles() * args.m;
    for (int unit = blockIdx.x + threadIdx.x / 32 * blocks; unit < units; unit += kWarps * blocks) {
        int const tile = unit / args.m;
        int const token = unit % args.m;
        Epilogue<T> const epilogue(args, which, phase / kProjections, tile, x, out);
        Partial const* const parts =
            args.partials[which] + (static_cast<int64_t>(tile) * p.split.splits * args.m + token) * kTileRows + lane;
        float sum = 0.0f;
        constexpr int kBatch = 8;
        for (int first = 0; first < p.split.splits; first += kBatch) {
            Partial batch[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) batch[j] = {0.0f, first + j < p.split.splits ? phase - 1 : phase};
            for (bool absent = true; absent;) {
                absent = false;
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    if (batch[j].phase == phase) continue;
                    batch[j] = load_partial(parts + static_cast<int64_t>(first + j) * args.m * kTileRows);
                    absent = true;
                }
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) sum += batch[j].value;
        }
        __syncwarp();
        turned[0][lane] = sum;
        __syncwarp();
        if (lane >= 4) continue;
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = turned[0][lane * 8 + i];
        epilogue.write(token, sums);
    }
}

// Makes a layer's activations absent again, a slice per block.
template <typename T>
__device__ void erase(T* activations, int64_t count, int blocks) {
    constexpr uint32_t kAbsent = 0x01010101u * kAbsentByte;
    for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count / 8; i += blocks * kThreads) {
        __stcg(reinterpret_cast<uint4*>(activations) + i, make_uint4(kAbsent, kAbsent, kAbsent, kAbsent));
    }
}

// NOTES: why the rings suffice. A block that multiplies `down` of layer l has seen all of x(l), so every block has
// finished `down` of layer l - 1 and nobody will read hidden(l - 1) or x(l - 1) again: it erases its slices of them,
// and fences before it publishes anything of its own. A block that writes or awaits hidden(l + 1) or x(l + 2), the next
// in those places, has seen all of x(l + 1), to which every erasing block contributed after its fence.
template <typename T, int kColumns, int kProjections>
__global__ __launch_bounds__(kThreads, 1) void sm80_w4a16_mlp(__grid_constant__ MlpArgs<T, kProjections> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float rms[8 * kColumns];
    __shared__ __align__(16) Turned turned[kWarps];
    uint8_t* const ring = shared + threadIdx.x / 32 * args.shared.stages * kStageBytes;
    uint8_t* const panel = shared + kWarps * args.shared.stages * kStageBytes;

    WeightStream<kProjections> stream(args.program, ring, args.shared.stages);
    // In this order: a kernel that starts early may then read, before its own wait, what ended two launches ago.
    wait_for_kernels_before();
    let_next_kernel_start();
    // While the first weights are on their way.
    for (int i = threadIdx.x; i < args.shared.panel_chunks * (kPanelBytesPerChunk<kColumns> / 16); i += kThreads) {
        reinterpret_cast<uint4*>(panel)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    int blocks = gridDim.x;
    for (Projection const& p : args.program.projections) blocks = min(blocks, p.tasks);

    for (int phase = args.program.first_phase; phase < args.program.last_phase; ++phase) {
        int const which = phase % kProjections;
        int const layer = phase / kProjections;
        Projection const& p = args.program.projections[which];
        bool const last = which == kProjections - 1;
        int64_t const x_size = static_cast<int64_t>(args.m) * args.program.projections[0].k;
        int64_t const hidden_size = static_cast<int64_t>(args.m) * p.k;  // when last
        auto const x_of = [&](int l) { return args.x_ring + l % kXBuffers * x_size; };
        T const* const x = layer == 0 ? args.x : x_of(layer);
        T* const hidden =
            args.hidden_ring + layer % kHiddenBuffers * args.m * args.program.projections[kProjections - 1].k;
        T const* const in = which == 0 ? x : hidden;
        bool const awaited = phase > 0;  // the caller's x is there, and may hold any NaN
        T* const out = !last ? hidden : layer == args.layers - 1 ? args.y : x_of(layer + 1);
        T const* norm_weight = args.surroundings[which].norm_weight;
        if (norm_weight != nullptr) {
            norm_weight += static_cast<int64_t>(layer) * p.k;
            inverse_rms(in, awaited, args.m, p.k, args.epsilon, rms);
        }
        if (kProjections > 1 && last && layer > 0 && blockIdx.x < blocks) {
            erase(args.hidden_ring + (layer - 1) % kHiddenBuffers * hidden_size, hidden_size, blocks);
            if (layer > 1) erase(x_of(layer - 1), x_size, blocks);
        }
        int staged = -1;
        for (int task_index = blockIdx.x; task_index < p.tasks; task_index += gridDim.x) {
            WarpTask const task(p, task_index);
            bool const has_rows = task.tile < p.tiles();
            Epilogue<T> const epilogue(args, which, layer, task.tile, x, out);
            Accumulators<kColumns> acc = {};
            for (int begin = task.begin; begin < task.end; begin += args.shared.panel_chunks) {
                int const end = min(begin + args.shared.panel_chunks, task.end);
                if (staged != begin) {
                    __syncthreads();
                    stage_activations<T, kColumns>(in, awaited, args.m, p.k, begin, end, norm_weight, rms, panel);
                    staged = begin;
                    if (kProjections > 1 && last) fence();
                    __syncthreads();
                }
                if (!has_rows) continue;
                for (int chunk = begin + task.k_group; chunk < end; chunk += p.split.k_groups) {
                    int const stage = stream.acquire();
                    multiply_chunk<T, kColumns>(ring + stage * kStageBytes,
                                                panel + (chunk - begin) * kPanelBytesPerChunk<kColumns>, args.one, acc);
                    stream.release();
                }
            }
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                finish_column(args, epilogue, task, phase, column, acc[0][column], acc[1][column], turned);
            }
        }
        if (p.split.splits > 1 && blockIdx.x < blocks)
            finish_split_tiles(args, phase, blocks, x, out, turned[threadIdx.x / 32]);
    }
}

}  // namespace trt_nvfp4::w4a16
