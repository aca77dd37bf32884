// A warp's products of a tile of weights, and perhaps of the next, by the number of tokens: one
// (sm80_w4a16_token.cuh), or up to 8 kColumns on the tensor cores (sm80_w4a16_product.cuh); and what these multiply:
// activations that other blocks publish.
#pragma once

#include "w4a16/stream/sm80_w4a16_mlp.cuh"
#include "w4a16/stream/sm80_w4a16_token.cuh"

namespace trt_nvfp4::decoder {

using w4a16::kChunk;
using w4a16::kWarps;

// A phase's activations: words of `layer`, [m, k].
template <typename T>
struct Words {
    uint32_t const* words;
    int layer, m, k;
    T const* norm_weight;  // [k], or null
    Divisor by_tokens;
};

// A phase's norm weights to L2, while its activations are awaited.
template <typename T>
__device__ __forceinline__ void prefetch_norm(Words<T> const& from) {
    for (int i = threadIdx.x * 64; i < from.k; i += w4a16::kThreads * 64) ptx::prefetch(from.norm_weight + i);
}

// 1 / rms of every token, by all consumer warps: a token is read by several of them where there are few.
template <typename T>
__device__ __forceinline__ void inverse_rms(Words<T> const& from, float epsilon, float* squares, float* rms) {
    constexpr int kBatch = 2;  // of eights that a lane asks for at once
    int const parts = max(kWarps / from.m, 1);
    int const units = (from.k + 255) / 256;  // each eight values a lane
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < from.m * parts; item += kWarps) {
        int const token = item / parts;
        w4a16::TokenInput<T, false> const row{nullptr, from.words + token * from.k, from.layer, from.k, nullptr, 0.0f};
        float sum = 0.0f;
#pragma unroll 1
        for (int unit = item % parts; unit < units; unit += kBatch * parts) {
            row.template read<kBatch>([&](int i) { return (unit + i * parts) * 256 + threadIdx.x % 32 * 8; },
                                      [&](int, uint4 eight) {
                                          T const* const values = reinterpret_cast<T const*>(&eight);
#pragma unroll
                                          for (int j = 0; j < 8; ++j) {
                                              float const value = ptx::to_float(values[j]);
                                              sum = fmaf(value, value, sum);
                                          }
                                      });
        }
        sum = ptx::warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[item] = sum;
    }
    w4a16::sync_warps();
    if (threadIdx.x < from.m) {
        float sum = 0.0f;
        for (int part = 0; part < parts; ++part) sum += squares[threadIdx.x * parts + part];
        rms[threadIdx.x] = 1.0f / sqrtf(sum / static_cast<float>(from.k) + epsilon);
    }
    w4a16::sync_warps();
}

template <typename T>
class TokenTile {
 public:
    using Element = T;
    using Sums = float[1][w4a16::kTurnPitch];  // [token][row]
    static constexpr int kColumns = 1;
    static constexpr int kTokens = 1;
    static constexpr bool kShares = true;  // a warp may have parts of two tiles
    static constexpr bool kExperts = false;
    static constexpr int kShift = w4a16::Decoder<__half>::kSumShift;

    static __host__ __device__ constexpr int chunk_bytes(int) { return w4a16::kTokenChunkBytes; }

    // Chunks [begin, end) to the staged tile.
    static __device__ __forceinline__ void stage(Words<T> const& from, float const* rms, int begin, int end,
                                                 uint8_t* staged_tile) {
        w4a16::TokenInput<T, false> const row{nullptr, from.words, from.layer, from.k, from.norm_weight, rms[0]};
        w4a16::stage_token<2>(row, begin, end, staged_tile);
    }
    // The same of all chunks, and the norm in front: x is read once where few enough chunks are a warp's.
    static constexpr int kHeldChunks = 2 * kWarps;
    static __device__ __forceinline__ void stage_normalized(Words<T> const& from, float epsilon, float* squares,
                                                            int chunks, uint8_t* staged_tile) {
        constexpr int kHeld = kHeldChunks / kWarps;
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int const t = lane / 2 % 4;
        int const word = lane / 8 * 2 + lane % 2;
        auto const offset = [&](int i) { return (warp + i * kWarps) * kChunk + t * 64 + word * 8; };
        w4a16::TokenInput<T, false> const row{nullptr, from.words, from.layer, from.k, nullptr, 0.0f};
        uint4 held[kHeld], weights[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            weights[i] = make_uint4(0u, 0u, 0u, 0u);
            if (offset(i) < from.k) weights[i] = *reinterpret_cast<uint4 const*>(from.norm_weight + offset(i));
        }
        float sum = 0.0f;
        row.template read<kHeld>(offset, [&](int i, uint4 eight) {
            held[i] = eight;
            T const* const values = reinterpret_cast<T const*>(&eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum = fmaf(ptx::to_float(values[j]), ptx::to_float(values[j]), sum);
        });
        sum = ptx::warp_sum(sum);
        if (lane == 0) squares[warp] = sum;
        w4a16::sync_warps();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) sum += squares[i];
        float const rms = 1.0f / sqrtf(sum / static_cast<float>(from.k) + epsilon);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            uint4 const eight = w4a16::normalize(held[i], reinterpret_cast<T const*>(&weights[i]), rms);
            HalfScale const scale(ptx::warp_max(greatest_of<T>(eight)), w4a16::Decoder<__half>::kSumExponent);
            // What lies beyond the last chunk was computed too, of zeros: no branch parts the chunks' instructions.
            int const chunk = warp + i * kWarps;
            if (chunk >= chunks) continue;
            uint8_t* const place = staged_tile + chunk * w4a16::kTokenChunkBytes;
            *reinterpret_cast<uint4*>(place + (word * 4 + t) * 16) =
                w4a16::pair_activations<__half>(scale.of<T>(eight));
            if (lane == 0) *reinterpret_cast<float*>(place + w4a16::kTokenFactor) = scale.factor();
        }
    }
    __device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* chunk, int, uint32_t one) {
        w4a16::multiply_token(stage, chunk, one, sums_);
    }
    __device__ __forceinline__ void swap() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float const of_tile = sums_[i];
            sums_[i] = next_[i];
            next_[i] = of_tile;
        }
    }
    // The sums of the next eight tokens.
    __device__ __forceinline__ void take_column(Sums& own, Sums& next) const {
        int const row = threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4;
        own[0][row] = w4a16::own_row(sums_);
        next[0][row] = w4a16::own_row(next_);
    }

 private:
    float sums_[4] = {}, next_[4] = {};
};

template <typename T, int kOfTokens>
class ColumnTile {
    using P = w4a16::Product<T, kOfTokens>;

 public:
    using Element = T;
    using Sums = w4a16::Turned;
    static constexpr int kColumns = kOfTokens;
    static constexpr int kTokens = P::kTokens;
    static constexpr bool kShares = kColumns == 1;  // of more columns two tiles' accumulators would spill
    static constexpr bool kExperts = false;
    static constexpr int kShift = w4a16::Decoder<typename P::Operand>::kScaleShift;

    static __host__ __device__ constexpr int chunk_bytes(int m) { return P::chunk_bytes(m); }

    // What the staged tile has of tokens above m is multiplied too, and nowhere kept.
    static __device__ __forceinline__ void stage(Words<T> const& from, float const* rms, int begin, int end,
                                                 uint8_t* staged_tile) {
        constexpr int kBatch = 4;
        int const t = threadIdx.x % 32 / 2 % 4;
        int const word = threadIdx.x % 32 / 8 * 2 + threadIdx.x % 2;
        int const rows = (end - begin) * from.m;
#pragma unroll 1
        for (int first = threadIdx.x / 32; first < rows; first += kWarps * kBatch) {
            w4a16::TaggedEight eights[kBatch] = {};  // as TokenInput::read
            auto const chunk = [&](int i) { return from.by_tokens.of(first + i * kWarps); };
            auto const token = [&](int i) { return first + i * kWarps - chunk(i) * from.m; };
            auto const offset = [&](int i) { return (begin + chunk(i)) * kChunk + t * 64 + word * 8; };
            auto const inside = [&](int i) { return first + i * kWarps < rows && offset(i) < from.k; };
            auto const load = [&](int i) { eights[i].load(from.words + token(i) * from.k + offset(i)); };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (inside(i)) load(i);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                while (inside(i) && !eights[i].is_of(from.layer)) {
                    __nanosleep(w4a16::kPollPause);
                    load(i);
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i * kWarps >= rows) break;
                uint4 eight = inside(i) ? eights[i].values() : make_uint4(0u, 0u, 0u, 0u);
                if (from.norm_weight != nullptr && inside(i)) {
                    eight = w4a16::normalize(eight, from.norm_weight + offset(i), rms[token(i)]);
                }
                w4a16::store_activations<T, kColumns>(staged_tile + chunk(i) * chunk_bytes(from.m), from.m, word,
                                                      token(i), t, eight);
            }
        }
    }
    __device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* chunk, int m, uint32_t one) {
        w4a16::multiply<T, kColumns, kColumns == 1 ? 1 : 2>(stage, chunk, m, one, acc_);
    }
    __device__ __forceinline__ void swap() { w4a16::swap(acc_, next_); }
    __device__ __forceinline__ void take_column(Sums& own, Sums& next) {
        w4a16::turn(acc_[0][0], acc_[1][0], own);
        w4a16::shift(acc_);
        if constexpr (kShares) {
            w4a16::turn(next_[0][0], next_[1][0], next);
            w4a16::shift(next_);
        }
    }

 private:
    w4a16::Accumulators<kColumns> acc_ = {}, next_ = {};
};

}  // namespace trt_nvfp4::decoder
