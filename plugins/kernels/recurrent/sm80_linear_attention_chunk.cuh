// The first launch of linear attention by chunks: what depends on no state, for every chunk of 64 tokens at once. With
// G the running sum of decays in a chunk and D[i][j] = exp(G[i] - G[j]), it leaves
//     scores       scale * (q k^T . D), on and below the diagonal;
//     corrections  (1 + A)^-1 diag(beta), A = beta (k k^T . D) below the diagonal (the WY form of the delta rule);
//     decays       G.
// The inverse is made in float32, of four blocks of 16 on the diagonal by substitution, of the others by
// T[i][j] = -T[i][i] (sum over m of A[i][m] T[m][j]), in TF32.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "recurrent/chunk_tiles.cuh"
#include "recurrent/running_decays.cuh"

namespace trt_nvfp4::recurrent {

constexpr int kChunkThreads = 128, kBlock = 16, kBlocks = kChunk / kBlock;
constexpr int kFloatPitch = kChunk + 4, kScratchPitch = kBlock + 4;  // of float32 matrices

template <int kKeyDim>
struct ChunkSizes {
    using Rows = Tile<kChunk, kKeyDim>;
    static constexpr int kOperands = 2 * Rows::kBytes;
    static constexpr int kMatrix = kChunk * kFloatPitch * 4;
    static constexpr int kScores = Tile<kChunk, kChunk>::kBytes;
    // The results take the operands' place once those are multiplied: the scores, whose place is then scratch, and of
    // the delta rule two matrices.
    static constexpr int results(bool delta) { return kScores + (delta ? 2 * kMatrix : 0); }
    static constexpr int shared(bool delta) { return kOperands > results(delta) ? kOperands : results(delta); }
};

// sums += a b, of 16x16 blocks of float32 with rows of `a_pitch` and `b_pitch` floats, by one warp: columns 0 to 7,
// then 8 to 15, as mma.sync has them.
__device__ __forceinline__ void multiply_block(float (&sums)[2][4], float const* a, int a_pitch, float const* b,
                                               int b_pitch) {
    int const g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < kBlock; k += 8) {
        float const left[4] = {a[g * a_pitch + k + t], a[(g + 8) * a_pitch + k + t], a[g * a_pitch + k + t + 4],
                               a[(g + 8) * a_pitch + k + t + 4]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float const* const right = b + (k + t) * b_pitch + 8 * n + g;
            ptx::mma_m16n8k8_tf32(sums[n], left, right[0], right[4 * b_pitch]);
        }
    }
}

// to = factor * sums.
__device__ __forceinline__ void store_block(float const (&sums)[2][4], float factor, float* to, int pitch) {
    int const row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float2*>(to + (row + 8 * half) * pitch + 8 * n + column) =
                make_float2(factor * sums[n][2 * half], factor * sums[n][2 * half + 1]);
        }
    }
}

// inverse = (1 + a)^-1, of a below the diagonal; scratch: a block of each warp.
__device__ __forceinline__ void invert(float const* a, float* inverse, float* scratch) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < kChunk * kChunk; i += kChunkThreads) {
        int const row = i / kChunk, column = i % kChunk;
        if (column / kBlock > row / kBlock) inverse[row * kFloatPitch + column] = 0.0f;
    }
    if (lane < kBlock) {
        float const* const block = a + warp * kBlock * (kFloatPitch + 1);
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int m = 0; m < i; ++m) x[i] -= block[i * kFloatPitch + m] * x[m];
            inverse[warp * kBlock * (kFloatPitch + 1) + i * kFloatPitch + lane] = x[i];
        }
    }
    __syncthreads();
    auto const at = [](int i, int j) { return i * kBlock * kFloatPitch + j * kBlock; };
    float* const own = scratch + warp * kBlock * kScratchPitch;
    for (int distance = 1; distance < kBlocks; ++distance) {
        int const i = warp, j = warp - distance;
        if (j >= 0) {
            float sums[2][4] = {}, product[2][4] = {};
            for (int m = j; m < i; ++m)
                multiply_block(sums, a + at(i, m), kFloatPitch, inverse + at(m, j), kFloatPitch);
            store_block(sums, 1.0f, own, kScratchPitch);
            __syncwarp();
            multiply_block(product, inverse + at(i, i), kFloatPitch, own, kScratchPitch);
            store_block(product, -1.0f, inverse + at(i, j), kFloatPitch);
        }
        __syncthreads();
    }
}

template <typename T, int kKeyDim, bool kDelta>
__global__ __launch_bounds__(kChunkThreads) void sm80_linear_attention_chunk(Args<T> args, ChunkWorkspace workspace,
                                                                             int chunk0) {
    using Sizes = ChunkSizes<kKeyDim>;
    using Rows = typename Sizes::Rows;
    using Square = Tile<kChunk, kChunk>;
    extern __shared__ uint4 shared_memory[];
    __shared__ float decays[kChunk], betas[kChunk];
    uint32_t const queries = ptx::shared_address(shared_memory), keys = queries + Rows::kBytes;
    int const head = blockIdx.y, batch = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const token0 = (chunk0 + static_cast<int>(blockIdx.x)) * kChunk, count = min(kChunk, args.tokens - token0);
    int64_t const slot = (int64_t{batch} * args.kv_heads + head) * workspace.chunks + blockIdx.x;
    int64_t const stride = int64_t{args.kv_heads} * args.key_dim;
    wait_for_kernels_before();

    int64_t const first = args.row(batch, token0, head, args.key_dim);
    copy_tile<Rows, kChunk, kKeyDim, kChunkThreads>(queries, args.query + first, stride, count, args.key_dim);
    copy_tile<Rows, kChunk, kKeyDim, kChunkThreads>(keys, args.key + first, stride, count, args.key_dim);
    ptx::cp_async_commit();
    if (warp == 0) sum_decays(load_decays(args, batch, head, token0, count), decays);
    if (kDelta && threadIdx.x >= kChunk) {
        int const token = threadIdx.x - kChunk;
        betas[token] = token < count ? ptx::to_float(args.beta_of(batch, token0 + token, head)) : 0.0f;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x < kChunk) workspace.decays[slot * kChunk + threadIdx.x] = decays[threadIdx.x];

    float similar[kDelta ? kChunk / 8 : 1][4] = {}, scores[kChunk / 8][4] = {};
#pragma unroll(kKeyDim <= 128 ? 2 : 1)
    for (int k = 0; k < kKeyDim; k += 16) {
        uint32_t query[4], key[4];
        load_a<Rows>(query, queries, warp * 16, k);
        if (kDelta) load_a<Rows>(key, keys, warp * 16, k);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            if (n > warp) continue;  // above the diagonal
            uint32_t b[4];
            load_b_transposed<Rows>(b, keys, k, n * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                ptx::mma_m16n8k16<T>(scores[2 * n + half], query[0], query[1], query[2], query[3], b[2 * half],
                                     b[2 * half + 1]);
                if constexpr (kDelta) {
                    ptx::mma_m16n8k16<T>(similar[2 * n + half], key[0], key[1], key[2], key[3], b[2 * half],
                                         b[2 * half + 1]);
                }
            }
        }
    }
    __syncthreads();  // the operands are read

    float* const a = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(shared_memory) + Sizes::kScores);
    float* const inverse = a + kChunk * kFloatPitch;
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = warp * 16 + lane / 4 + 8 * half, column = 8 * n + lane % 4 * 2;
            float score[2], similarity[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float const decay = column + i <= row ? decay_between(decays[row], decays[column + i]) : 0.0f;
                score[i] = column + i <= row ? scores[n][2 * half + i] * decay * args.scale : 0.0f;
                if constexpr (kDelta) {
                    similarity[i] = column + i < row ? similar[n][2 * half + i] * decay * betas[row] : 0.0f;
                }
            }
            store_pair<Square, T>(queries, row, column, score[0], score[1]);
            if constexpr (kDelta) {
                *reinterpret_cast<float2*>(a + row * kFloatPitch + column) = make_float2(similarity[0], similarity[1]);
            }
        }
    }
    __syncthreads();
    auto* const scores_out = static_cast<uint4*>(workspace.scores) + slot * kChunk * kChunk / 8;
    for (int i = threadIdx.x; i < kChunk * kChunk / 8; i += kChunkThreads) {
        scores_out[i] = ptx::load_shared_unit(Square::at(queries, i / (kChunk / 8), i % (kChunk / 8) * 8));
    }
    if constexpr (kDelta) {
        __syncthreads();  // the scores' place is scratch from here on
        invert(a, inverse, reinterpret_cast<float*>(shared_memory));
        auto* const corrections_out = static_cast<uint4*>(workspace.corrections) + slot * kChunk * kChunk / 8;
        for (int i = threadIdx.x; i < kChunk * kChunk / 8; i += kChunkThreads) {
            int const row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            float const* const from = inverse + row * kFloatPitch + column;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = pack<T>(from[2 * j] * betas[column + 2 * j], from[2 * j + 1] * betas[column + 2 * j + 1]);
            }
            corrections_out[i] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

}  // namespace trt_nvfp4::recurrent
