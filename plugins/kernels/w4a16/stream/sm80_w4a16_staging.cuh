// Activations in flight to the tensor cores: the consumer warps await them, normalize them and lay them out in
// a staged tile in shared memory.
#pragma once

#include "exchange/sentinels.cuh"
#include "formats/half_scale.cuh"
#include "ptx/element.cuh"
#include "ptx/named_barrier.cuh"
#include "w4a16/stream/sm80_w4a16_product.cuh"

namespace trt_nvfp4::w4a16 {

// Barrier of the kSynced consumer warps.
template <int kSynced = kWarps>
__device__ __forceinline__ void sync_warps() {
    ptx::sync_warps<32 * kSynced>();
}

// Loads again, from source(i), those eights that are sentinels until they are written: all at once, since a trip to L2
// for each would add up.
template <int kCount, typename Source>
__device__ __forceinline__ void await_eights(uint4 (&eights)[kCount], bool awaited, Source&& source) {
    for (bool sentinel = awaited; sentinel;) {
        sentinel = false;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (!has_sentinel(eights[i])) continue;
            eights[i] = load_eight(source(i));
            sentinel = true;
        }
    }
}

// 1 / rms of every token's x, for the norm in front of a projection.
template <typename T>
__device__ void inverse_rms(T const* x, bool awaited, int m, int k, float epsilon, float* out) {
    constexpr int kBatch = 8;
    int const units = k / 8;
    for (int token = threadIdx.x / 32; token < m; token += kWarps) {
        T const* const row = x + static_cast<int64_t>(token) * k;
        float squares = 0.0f;
#pragma unroll 1
        for (int first = threadIdx.x % 32; first < units; first += 32 * kBatch) {
            uint4 eights[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                eights[i] = make_uint4(0u, 0u, 0u, 0u);
                if (first + i * 32 < units) eights[i] = load_eight(row + (first + i * 32) * 8);
            }
            await_eights(eights, awaited, [&](int i) { return row + (first + i * 32) * 8; });
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                T const* const values = reinterpret_cast<T const*>(&eights[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) squares = fmaf(ptx::to_float(values[j]), ptx::to_float(values[j]), squares);
            }
        }
        squares = ptx::warp_sum(squares);
        if (threadIdx.x % 32 == 0) out[token] = 1.0f / sqrtf(squares / static_cast<float>(k) + epsilon);
    }
    sync_warps();
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

// Where a phase's activations are.
template <typename T>
struct Activations {
    T const* x;    // [m, k]
    bool awaited;  // sentinels until another block writes them
    int m, k;
    T const* norm_weight;      // [k], or null
    float const* inverse_rms;  // [m]
};

// A warp's values, eight a lane, as FP16, and the factor that makes them right again.
template <typename T>
__device__ __forceinline__ uint4 to_half(uint4 eight, float& factor) {
    HalfScale const scale(ptx::warp_max(greatest_of<T>(eight)));
    factor = scale.factor();
    return scale.of<T>(eight);
}

// A lane's eight values of a token to a chunk of the staged tile, in the order in which they are multiplied. By a whole
// warp.
template <typename T, int kColumns>
__device__ __forceinline__ void store_activations(uint8_t* chunk, int m, int word, int token, int t, uint4 eight) {
    using P = Product<T, kColumns>;
    if constexpr (P::kHasFactors) {
        float factor;
        eight = to_half<T>(eight, factor);
        *reinterpret_cast<float*>(chunk + P::factors(m) + 4 * token) = factor;
    }
    int const slot = (word * kColumns + token / 8) * P::places(m) * 4 + token % 8 * 4 + t;
    *reinterpret_cast<uint4*>(chunk + slot * 16) = pair_activations<typename P::Operand>(eight);
}

// Chunks [begin, end) to the staged tile as they appear: 16 bytes are eight values of a token, see multiply_chunk.
// Places of tokens above m keep the zeros of the kernel's start.
template <typename T, int kColumns>
__device__ void stage_activations(Activations<T> const& from, int begin, int end, uint8_t* staged_tile) {
    constexpr int kBatch = 8;
    int lane = threadIdx.x % 32;
    if (kColumns == 4) asm volatile("" : "+r"(lane));  // see multiply_chunk
    int const t = lane / 2 % 4;
    int const word = lane / 8 * 2 + lane % 2;
    int const rows = (end - begin) * from.m;
    int const chunk_bytes = Product<T, kColumns>::chunk_bytes(from.m);
    int chunk = threadIdx.x / 32 / from.m;
    int token = threadIdx.x / 32 % from.m;
    int const chunk_step = kWarps / from.m;
    int const token_step = kWarps % from.m;
    for (int first = threadIdx.x / 32; first < rows; first += kWarps * kBatch) {
        uint4 eights[kBatch];
        unsigned places[kBatch];  // chunk and token
        auto const offset = [&](int i) { return (begin + places[i] / kMaxMmaTokens) * kChunk + t * 64 + word * 8; };
        auto const source = [&](int i) {
            return from.x + static_cast<int64_t>(places[i] % kMaxMmaTokens) * from.k + offset(i);
        };
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            places[i] = chunk * kMaxMmaTokens + token;
            chunk += chunk_step;
            token += token_step;
            if (token >= from.m) {
                token -= from.m;
                ++chunk;
            }
            eights[i] = make_uint4(0u, 0u, 0u, 0u);
            if (first + i * kWarps < rows && offset(i) < from.k) eights[i] = load_eight(source(i));
        }
        await_eights(eights, from.awaited, source);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kWarps >= rows) break;
            if (from.norm_weight != nullptr && offset(i) < from.k) {
                eights[i] =
                    normalize(eights[i], from.norm_weight + offset(i), from.inverse_rms[places[i] % kMaxMmaTokens]);
            }
            store_activations<T, kColumns>(staged_tile + places[i] / kMaxMmaTokens * chunk_bytes, from.m, word,
                                           places[i] % kMaxMmaTokens, t, eights[i]);
        }
    }
}

}  // namespace trt_nvfp4::w4a16
