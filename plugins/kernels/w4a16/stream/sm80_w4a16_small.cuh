// y = activation(x W^T + bias) of up to 16 tokens, for a W so small that a launch is over soon: all blocks find room on
// the SMs at once, where possible two on each, so that a block of the next launch fetches its own weights meanwhile.
//
// A block has one tile of rows and no loops over tasks, whose code small linears would wait for. Warp w stages and
// multiplies chunks w, w + kWarps, ... of K; the warps meet once, behind their products. Where x is large, the blocks
// of a cluster of two have both tiles, each with every second chunk of K, and so half of x.
#pragma once

#include "ptx/cluster.cuh"
#include "w4a16/stream/sm80_w4a16_mlp.cuh"
#include "w4a16/stream/sm80_w4a16_token.cuh"

namespace trt_nvfp4::w4a16 {

// Hopper's code takes fewer registers than Blackwell's.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kForHopper = true;
#else
constexpr bool kForHopper = false;
#endif

constexpr int kSmallFixedBytes = Rings<kWarps>::kBarriers * sizeof(uint64_t);

// What a cluster's other block adds to this one's tile: sums[token][row] and the barrier that counts their bytes.
template <int kTokens>
struct SentSums {
    float sums[kTokens][kTileRows];
    uint64_t barrier;
};

template <typename T>
struct SmallArgs {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    T const* bias;
    T const* x;
    T* y;
    int rows, k, m;
    TrtNvfp4Activation activation;
    SmallLinear shape;
    int in_flight;  // stages that a producer warp keeps in flight
    uint32_t one;   // 1, see shift_left
};

// A warp's products of one token.
template <typename T>
class TokenProducts {
 public:
    using Element = T;
    static constexpr int kTokens = 1;
    static __host__ __device__ constexpr int blocks_on_sm(bool) { return 2; }
    static constexpr int kShift = Decoder<__half>::kSumShift;

    static __host__ __device__ constexpr int chunk_bytes(int) { return kTokenChunkBytes; }

    static __device__ __forceinline__ void clear(SmallArgs<T> const&, uint8_t*) {}

    static __device__ __forceinline__ void stage(SmallArgs<T> const& args, int, uint8_t* staged_tile) {
        TokenInput<T, true> const from{args.x, nullptr, 0, args.k, nullptr, 0.0f};
        stage_token<2>(from, 0, args.shape.chunks, staged_tile);
    }
    __device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* chunk, SmallArgs<T> const& args) {
        multiply_token(stage, chunk, args.one, sums_);
    }
    __device__ __forceinline__ void store(Turned* turned) const {
        turned[0][0][threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4] = own_row(sums_);
    }

 private:
    float sums_[4] = {};
};

// The same of up to 8 * kColumns tokens.
template <typename T, int kColumns>
class ColumnProducts {
    using P = Product<T, kColumns>;
    static constexpr bool kFromBf16 = std::is_same_v<T, __nv_bfloat16>;

 public:
    using Element = T;
    static constexpr int kTokens = P::kTokens;
    // As registers allow, so that none spill: two blocks leave each thread 80. BF16's halves of a chunk come one after
    // the other where that is needed for it.
    static __host__ __device__ constexpr int blocks_on_sm(bool hopper) { return kColumns == 1 || hopper ? 2 : 1; }
    static constexpr int kHalves = kFromBf16 && kForHopper == (kColumns == 2) ? 1 : 2;
    static constexpr int kShift = Decoder<typename P::Operand>::kScaleShift;

    static __host__ __device__ constexpr int chunk_bytes(int m) { return P::chunk_bytes(m); }

    // Clears the chunks that the warp stages, so that columns without a token are zeros.
    static __device__ __forceinline__ void clear(SmallArgs<T> const& args, uint8_t* staged_tile) {
        int const bytes = chunk_bytes(args.m);
        if (args.m == P::kTokens || (!P::kHasFactors && args.m == P::places(args.m))) return;
        for (int chunk = threadIdx.x / 32; chunk < args.shape.staged_tile_chunks; chunk += kWarps) {
            auto* const units = reinterpret_cast<uint4*>(staged_tile + chunk * bytes);
            for (int i = threadIdx.x % 32; i < bytes / 16; i += 32) units[i] = make_uint4(0u, 0u, 0u, 0u);
        }
        __syncwarp();
    }

    // Every kWarps-th chunk of the staged tile, which has those of K from `rank` on that are the block's.
    static __device__ __forceinline__ void stage(SmallArgs<T> const& args, int rank, uint8_t* staged_tile) {
        constexpr int kBatch = 8;  // loads at once
        int const lane = threadIdx.x % 32;
        int const t = lane / 2 % 4;
        int const word = lane / 8 * 2 + lane % 2;
        Place loaded{static_cast<int>(threadIdx.x) / 32, 0}, stored = loaded;
#pragma unroll 1
        while (loaded.chunk < args.shape.staged_tile_chunks) {
            uint4 eights[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                int const at = (rank + loaded.chunk * args.shape.cluster) * kChunk + t * 64 + word * 8;
                eights[i] = make_uint4(0u, 0u, 0u, 0u);
                if (at < args.k) eights[i] = load_eight(args.x + loaded.token * args.k + at);
                loaded.advance(args.m);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (stored.chunk >= args.shape.staged_tile_chunks) break;
                store_activations<T, kColumns>(staged_tile + stored.chunk * chunk_bytes(args.m), args.m, word,
                                               stored.token, t, eights[i]);
                stored.advance(args.m);
            }
        }
    }
    __device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* chunk, SmallArgs<T> const& args) {
        w4a16::multiply<T, kColumns, kHalves>(stage, chunk, args.m, args.one, acc_);
    }
    __device__ __forceinline__ void store(Turned* turned) const {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) turn(acc_[0][i], acc_[1][i], turned[i]);
    }

 private:
    struct Place {
        int chunk, token;

        __device__ __forceinline__ void advance(int m) {
            if (++token < m) return;
            token = 0;
            chunk += kWarps;
        }
    };

    Accumulators<kColumns> acc_ = {};
};

template <class Products, int kCluster>
__global__ __launch_bounds__(kBlockThreads, Products::blocks_on_sm(kForHopper)) void sm80_w4a16_small(
    __grid_constant__ SmallArgs<typename Products::Element> const args) {
    using T = typename Products::Element;
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    static_assert(kCluster == 1 || kCluster == 2);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if (kCluster == 2) return;  // never launched: there are no clusters
#endif
    extern __shared__ __align__(128) uint8_t small_shared[];
    __shared__ uint64_t ring_barriers[Rings<kWarps>::kBarriers];
    SmallLinear const& shape = args.shape;
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const tile = blockIdx.x;
    int const rank = tile % kCluster;
    Rings<kWarps> const rings(small_shared, ring_barriers, shape.stages);
    uint8_t* const staged_tile = small_shared + kWarps * shape.stages * kStageBytes;
    auto& sent = *reinterpret_cast<SentSums<Products::kTokens>*>(staged_tile + shape.staged_tile_chunks *
                                                                                   Products::chunk_bytes(args.m));
    uint32_t const all_sent = ptx::shared_address(&sent.barrier);
    if (lane == 0 && warp < kWarps) rings.init(warp);
    if constexpr (kCluster == 2) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(all_sent, 1);
            ptx::mbarrier_init_fence();
            ptx::mbarrier_arrive_expect(all_sent, args.m * static_cast<int>(sizeof(sent.sums[0])));
        }
    }
    __syncthreads();
    if constexpr (kCluster == 2) ptx::cluster_arrive();
    if (warp >= kWarps) {
        constexpr int kRings = kWarps / kProducers;
        int const first = uniform(warp - kWarps) * kRings;
        TileCopies copies[kRings];
#pragma unroll
        for (int i = 0; i < kRings; ++i) {
            int const of = first + i;
            copies[i] = TileCopies({args.codes, args.scales, args.rows, args.k, tile - rank + of % kCluster,
                                    of - of % kCluster + rank, shape.chunks, kWarps});
        }
        RingPosition at;
        fill<true>(args.in_flight, rings, at, first, copies, shape.steps);
        if constexpr (kCluster == 2) ptx::cluster_wait();
        return;
    }
    int const row = tile / kTilesPerGroup * 128 + lane / 8 * 32 + tile % kTilesPerGroup * 8 + lane % 8;
    float tensor_scale = 0.0f;
    T bias{};
    if (warp < args.m && row < args.rows) {
        tensor_scale = *args.tensor_scale;
        bias = args.bias[row];
    }
    Products::clear(args, staged_tile);
    wait_for_kernels_before();
    let_next_kernel_start();

    Products::stage(args, rank, staged_tile);
    if (kCluster == 1) {
        __syncwarp();
    } else {
        sync_warps();
    }
    Products products;
    RingPosition at;
    // All steps, so that nothing still arrives once the block has gone.
#pragma unroll 1
    for (int step = 0; step < shape.steps; ++step) {
        uint8_t const* const stage = rings.acquire(warp, at);
        int const chunk = (step * kWarps + warp) / kCluster;
        if (rank + chunk * kCluster < shape.chunks) {
            products.multiply(stage, staged_tile + chunk * Products::chunk_bytes(args.m), args);
        }
        rings.release(warp, at);
    }
    // In place of the warp's weights, which only it reads.
    auto const turned = [&](int of_warp) { return reinterpret_cast<Turned*>(small_shared + of_warp * kStageBytes); };
    static_assert(2 * sizeof(Turned) <= kStageBytes);
    __syncwarp();
    products.store(turned(warp));
    sync_warps();
    auto const add_up = [&](int of_tile, int token) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; i += kCluster) sum += turned(i + of_tile)[token / 8][token % 8][lane];
        return sum;
    };
    if constexpr (kCluster == 2) {
        ptx::cluster_wait();  // for the other block's barrier
        for (int token = warp; token < args.m; token += kWarps) {
            ptx::send_to_block(&sent.sums[token][lane], all_sent, rank ^ 1, add_up(rank ^ 1, token));
        }
        ptx::mbarrier_wait(all_sent, 0);
    }
    for (int token = warp; token < args.m && row < args.rows; token += kWarps) {
        float sum = add_up(rank, token);
        if (kCluster == 2) sum += sent.sums[token][lane];
        float const value = fmaf(sum, tensor_scale * static_cast<float>(1 << Products::kShift), ptx::to_float(bias));
        args.y[static_cast<int64_t>(token) * args.rows + row] =
            ptx::from_float<T>(activate_one(args.activation, value));
    }
}

}  // namespace trt_nvfp4::w4a16
