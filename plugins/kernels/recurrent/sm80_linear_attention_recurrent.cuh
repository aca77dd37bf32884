// Linear attention token by token. A block has 32 columns of one state, which stays in registers from the first token
// to the last: it is read and written once. Columns are independent of each other, rows are summed over: a thread has
// four columns of kRows rows, and one exchange between the block's warps per token gives both k S and q S:
//     y = q (S + k^T u) = q S + (q k) u.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "recurrent/launch.h"

namespace trt_nvfp4::recurrent {

constexpr int kRecurrentThreads = 128, kRecurrentWarps = kRecurrentThreads / 32;
constexpr int kColumns = 32, kRowGroups = kRecurrentThreads / (kColumns / 4);
constexpr int kBlockTokens = kRecurrentThreads / 8;  // whose rows are in shared memory at once, at most

struct Float4 {
    float x[4] = {};
};

__device__ __forceinline__ Float4 load4(float const* from) {
    float4 const four = *reinterpret_cast<float4 const*>(from);
    return {four.x, four.y, four.z, four.w};
}

// A token's rows in shared memory, in floats.
template <int kRows>
struct TokenLayout {
    static constexpr int rows = kRows * kRowGroups;  // of the state, padded
    int group, decay_dim;

    __host__ __device__ int queries() const { return rows; }
    __host__ __device__ int decays() const { return rows * (1 + group); }
    __host__ __device__ int values() const { return decays() + (decay_dim > 1 ? rows : 4); }
    __host__ __device__ int products() const { return values() + kColumns; }  // q k of each query head, then beta
    __host__ __device__ int size() const { return products() + (group + 1 + 3) / 4 * 4; }
};

// Sums of the block's row groups. Lanes 8 and 16 apart hold other rows of the same columns.
__device__ __forceinline__ void exchange(Float4 const& first, Float4 const& second, float (*partial)[2][kColumns]) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool const upper = (lane & 8) != 0, right = (lane & 16) != 0;
    float kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float const given = __shfl_xor_sync(0xffffffffu, upper ? first.x[i] : second.x[i], 8);
        kept[i] = (upper ? second.x[i] : first.x[i]) + given;
    }
    float2 sum;
    float* const halves = &sum.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float const given = __shfl_xor_sync(0xffffffffu, right ? kept[i] : kept[2 + i], 16);
        halves[i] = (right ? kept[2 + i] : kept[i]) + given;
    }
    *reinterpret_cast<float2*>(&partial[warp][upper][lane % 8 * 4 + (right ? 2 : 0)]) = sum;
}

__device__ __forceinline__ Float4 summed(float (*partial)[2][kColumns], int which, int column) {
    Float4 sum;
#pragma unroll
    for (int warp = 0; warp < kRecurrentWarps; ++warp) {
        Float4 const part = load4(&partial[warp][which][column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.x[i] += part.x[i];
    }
    return sum;
}

template <int kRows, typename Decay>
__device__ __forceinline__ void decay_rows(Float4 (&state)[kRows], Decay decay) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float const factor = decay(r);
#pragma unroll
        for (int i = 0; i < 4; ++i) state[r].x[i] *= factor;
    }
}

// sum += the thread's part of row times state.
template <int kRows>
__device__ __forceinline__ void add_products(Float4& sum, Float4 const (&state)[kRows], float const* row) {
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
        Float4 const four = load4(row + r);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum.x[i] += state[r + j].x[i] * four.x[j];
        }
    }
}

template <typename T>
__device__ __forceinline__ void store4(T* to, Float4 const& values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = ptx::from_float<T>(values.x[i]);
}

// A piece of a token's rows, 16 bytes of global memory: where it is from (null: zeros), and where its floats go.
template <typename T>
struct Piece {
    T const* from;
    float* to;
    float factor;
    bool exponential;
};

// Piece i of those that `count` tokens from `first` on have: keys, queries, decays of rows, then values.
template <typename T, typename TokenLayout>
__device__ __forceinline__ Piece<T> piece_of(Args<T> const& args, TokenLayout const& layout, float* shared, int batch,
                                             int head, int column0, int first, int i) {
    constexpr int kUnit = 16 / sizeof(T);
    constexpr int units = TokenLayout::rows / kUnit;
    int const rows = 1 + args.group + (args.decay_dim > 1);
    int const of_token = rows * units + kColumns / kUnit;
    int const token = i / of_token, unit = i % of_token, row = unit / units, at = unit % units * kUnit;
    int64_t const place = args.row(batch, first + token, head, 1);
    float* const to = shared + token * layout.size();
    if (row >= rows) {
        int const column = (unit - rows * units) * kUnit;
        T const* const value = args.value + place * args.value_dim + column0 + column;
        return {column0 + column < args.value_dim ? value : nullptr, to + layout.values() + column, 1.0f, false};
    }
    T const* from = args.key + place * args.key_dim + at;
    float factor = 1.0f;
    if (row > args.group) {
        from = args.decay + place * args.key_dim + at;
    } else if (row > 0) {
        from = args.query + (place * args.group + row - 1) * args.key_dim + at;
        factor = args.scale;
    }
    return {at < args.key_dim ? from : nullptr, to + row * layout.rows + at, factor, row > args.group};
}

// Keys, scaled queries, exponentials of decays, values, then q k and beta, of `count` tokens from `first` on. Loads are
// many at once: nothing else hides their latency.
template <typename T, typename TokenLayout>
__device__ __forceinline__ void load_tokens(Args<T> const& args, TokenLayout const& layout, float* shared, int batch,
                                            int head, int column0, int first, int count) {
    constexpr int kUnit = 16 / sizeof(T), kAtOnce = 2;
    // What is one number of a token: eight threads share it.
    int const token = threadIdx.x / 8, lane = threadIdx.x % 8;
    float decay = 0.0f, beta = 0.0f;
    if (lane == 0 && token < count) {
        if (args.decay_dim == 1) decay = ptx::to_float(args.decay[args.row(batch, first + token, head, 1)]);
        if (args.beta_heads > 0) beta = ptx::to_float(args.beta_of(batch, first + token, head));
    }
    int const rows = 1 + args.group + (args.decay_dim > 1);
    int const pieces = count * (rows * layout.rows + kColumns) / kUnit;
    for (int i = threadIdx.x; i < pieces; i += kAtOnce * kRecurrentThreads) {
        union {
            uint4 words;
            T x[kUnit];
        } loaded[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            loaded[j].words = make_uint4(0, 0, 0, 0);
            if (i + j * kRecurrentThreads >= pieces) break;
            auto const piece = piece_of(args, layout, shared, batch, head, column0, first, i + j * kRecurrentThreads);
            if (piece.from != nullptr) loaded[j].words = *reinterpret_cast<uint4 const*>(piece.from);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (i + j * kRecurrentThreads >= pieces) break;
            auto const piece = piece_of(args, layout, shared, batch, head, column0, first, i + j * kRecurrentThreads);
#pragma unroll
            for (int e = 0; e < kUnit; e += 4) {
                float x[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    x[k] = ptx::to_float(loaded[j].x[e + k]) * piece.factor;
                    if (piece.exponential) x[k] = expf(x[k]);
                }
                *reinterpret_cast<float4*>(piece.to + e) = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
    }
    __syncthreads();
    float* const own = shared + min(token, count - 1) * layout.size();
    if (lane == 0 && token < count) {
        if (args.decay_dim <= 1) own[layout.decays()] = expf(decay);
        own[layout.products() + args.group] = beta;
    }
    for (int h = 0; h < args.group; ++h) {
        float sum = 0.0f;
        for (int at = 4 * lane; at < layout.rows; at += 32) {
            Float4 const key = load4(own + at), query = load4(own + (1 + h) * layout.rows + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += key.x[i] * query.x[i];
        }
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0 && token < count) own[layout.products() + h] = sum;
    }
    __syncthreads();
}

// What a thread has of the states: columns column0 + own to column0 + own + 3, rows row0 to row0 + kRows - 1.
template <int kRows>
struct Part {
    int head, column0, own, row0;

    template <typename T>
    __device__ __forceinline__ Part(Args<T> const& args, unsigned thread, unsigned block) {
        unsigned const blocks = (args.value_dim + kColumns - 1) / kColumns;
        head = block / blocks;
        column0 = block % blocks * kColumns;
        own = thread % (kColumns / 4) * 4;
        row0 = thread / (kColumns / 4) * kRows;
    }

    template <typename T>
    __device__ __forceinline__ int64_t place(Args<T> const& args, int batch) const {
        return args.state(batch, head) + row0 * args.value_dim + column0 + own;
    }
};

// As many as registers leave room for without a spill.
template <typename T>
constexpr int recurrent_blocks_per_sm(int rows) {
    return rows > 8 ? 3 : sizeof(T) == 4 ? 5 : 6;
}

template <typename T, int kRows>
__global__ __launch_bounds__(kRecurrentThreads,
                             recurrent_blocks_per_sm<T>(kRows)) void sm80_linear_attention_recurrent(Args<T> args,
                                                                                                     int block_tokens) {
    extern __shared__ float4 shared_memory[];
    __shared__ float partial[2][kRecurrentWarps][2][kColumns];
    float* const shared = reinterpret_cast<float*>(shared_memory);
    TokenLayout<kRows> const layout{args.group, args.decay_dim};
    int const batch = blockIdx.y;
    Part<kRows> const part(args, threadIdx.x, blockIdx.x);
    int const head = part.head, column0 = part.column0, own = part.own, row0 = part.row0;
    bool const inside = column0 + own < args.value_dim;
    wait_for_kernels_before();

    Float4 state[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (inside && row0 + r < args.key_dim && args.past != nullptr) {
            state[r] = load4(args.past + part.place(args, batch) + r * args.value_dim);
        }
    }
    int exchanges = 0;
    for (int first = 0; first < args.tokens; first += block_tokens) {
        int const count = min(block_tokens, args.tokens - first);
        if (first > 0) __syncthreads();
        load_tokens(args, layout, shared, batch, head, column0, first, count);
        for (int token = 0; token < count; ++token) {
            float const* const rows = shared + token * layout.size();
            if (args.decay_dim > 1) {
                decay_rows(state, [&](int r) { return rows[layout.decays() + row0 + r]; });
            } else if (args.decay_dim == 1) {
                decay_rows(state, [decay = rows[layout.decays()]](int) { return decay; });
            }
            Float4 recalled, read;
            add_products(recalled, state, rows + row0);
            add_products(read, state, rows + layout.queries() + row0);
            auto* buffer = partial[exchanges++ % 2];
            exchange(recalled, read, buffer);
            __syncthreads();
            Float4 update = load4(rows + layout.values() + own);
            if (args.beta_heads > 0) {
                Float4 const sums = summed(buffer, 0, own);
                float const beta = rows[layout.products() + args.group];
#pragma unroll
                for (int i = 0; i < 4; ++i) update.x[i] = beta * (update.x[i] - sums.x[i]);
            }
            T* const y =
                args.y +
                ((int64_t{batch} * args.tokens + first + token) * args.heads + head * args.group) * args.value_dim +
                column0 + own;
            // One of the row groups writes what all know.
            bool const writes = inside && threadIdx.x / (kColumns / 4) == token % kRowGroups;
            auto const finish = [&](int h) {
                if (!writes) return;
                Float4 sums = summed(buffer, 1, own);
                float const product = rows[layout.products() + h];
#pragma unroll
                for (int i = 0; i < 4; ++i) sums.x[i] += product * update.x[i];
                store4(y + int64_t{h} * args.value_dim, sums);
            };
            finish(0);
            for (int h = 1; h < args.group; ++h) {
                Float4 other, unused;
                add_products(other, state, rows + layout.queries() + h * layout.rows + row0);
                buffer = partial[exchanges++ % 2];
                exchange(unused, other, buffer);
                __syncthreads();
                finish(h);
            }
#pragma unroll
            for (int r = 0; r < kRows; r += 4) {
                Float4 const key = load4(rows + row0 + r);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) state[r + j].x[i] += key.x[j] * update.x[i];
                }
            }
        }
    }
    // Found anew, and not kept meanwhile: registers are short.
    unsigned thread = threadIdx.x, block = blockIdx.x;
    asm volatile("" : "+r"(thread), "+r"(block));
    Part<kRows> const again(args, thread, block);
    float* const present = args.present + again.place(args, batch);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (again.column0 + again.own < args.value_dim && again.row0 + r < args.key_dim) {
            *reinterpret_cast<float4*>(present + r * args.value_dim) =
                make_float4(state[r].x[0], state[r].x[1], state[r].x[2], state[r].x[3]);
        }
    }
}

}  // namespace trt_nvfp4::recurrent
