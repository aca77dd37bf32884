// y = activation(x W^T + bias) of up to 16 tokens, for a W so small that a launch is over soon: all of a block's
// weights and activations find room at once, where possible in half of an SM's shared memory, so that a block of the
// next launch fetches its own weights meanwhile.
//
// A block has one tile of rows and no loops over tasks, whose code small linears would wait for. Warp w stages and
// multiplies chunks w, w + kWarps, ... of K; the warps meet once, behind their products.
#pragma once

#include "sm80_w4a16_mlp.cuh"
#include "sm80_w4a16_token.cuh"

namespace trt_nvfp4::w4a16 {

constexpr int kSmallFixedBytes = Rings<kWarps>::kBarriers * sizeof(uint64_t);

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
    int in_flight;  // stages that a filler keeps under way
    uint32_t one;   // 1, see shift_left
};

// A warp's products of one token.
template <typename T>
class TokenProducts {
 public:
    static constexpr int kBlocksOnSm = 2;
    static constexpr int kShift = Decoder<__half>::kSumShift;

    static __host__ __device__ constexpr int chunk_bytes(int) { return kTokenChunkBytes; }

    static __device__ __forceinline__ void clear(SmallArgs<T> const&, uint8_t*) {}

    static __device__ __forceinline__ void stage(SmallArgs<T> const& args, uint8_t* panel) {
        TokenInput<T, true> const from{args.x, nullptr, 0, args.k, nullptr, 0.0f};
        stage_token<2>(from, 0, args.shape.chunks, panel);
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

 public:
    static constexpr int kBlocksOnSm = kColumns == 1 ? 2 : 1;
    static constexpr int kShift = Decoder<typename P::Operand>::kScaleShift;

    static __host__ __device__ constexpr int chunk_bytes(int m) { return P::chunk_bytes(m); }

    // Of the warp's chunks, so that columns without a token are zeros.
    static __device__ __forceinline__ void clear(SmallArgs<T> const& args, uint8_t* panel) {
        int const bytes = chunk_bytes(args.m);
        if (args.m == P::kTokens || (!P::kHasFactors && args.m == P::places(args.m))) return;
        for (int chunk = threadIdx.x / 32; chunk < args.shape.chunks; chunk += kWarps) {
            auto* const units = reinterpret_cast<uint4*>(panel + chunk * bytes);
            for (int i = threadIdx.x % 32; i < bytes / 16; i += 32) units[i] = make_uint4(0u, 0u, 0u, 0u);
        }
        __syncwarp();
    }

    // Each warp the chunks that it multiplies.
    static __device__ __forceinline__ void stage(SmallArgs<T> const& args, uint8_t* panel) {
        constexpr int kBatch = 8;  // loads at once
        int const lane = threadIdx.x % 32;
        int const t = lane / 2 % 4;
        int const word = lane / 8 * 2 + lane % 2;
        int chunk = threadIdx.x / 32, token = 0;
#pragma unroll 1
        while (chunk < args.shape.chunks) {
            uint4 eights[kBatch];
            int chunks[kBatch], tokens[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                chunks[i] = chunk;
                tokens[i] = token;
                int const at = chunk * kChunk + t * 64 + word * 8;
                eights[i] = make_uint4(0u, 0u, 0u, 0u);
                if (at < args.k) eights[i] = load_eight(args.x + token * args.k + at);
                if (++token == args.m) {
                    token = 0;
                    chunk += kWarps;
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (chunks[i] >= args.shape.chunks) break;
                store_activations<T, kColumns>(panel + chunks[i] * chunk_bytes(args.m), args.m, word, tokens[i], t,
                                               eights[i]);
            }
        }
    }
    __device__ __forceinline__ void multiply(uint8_t const* stage, uint8_t const* chunk, SmallArgs<T> const& args) {
        w4a16::multiply<T, kColumns>(stage, chunk, args.m, args.one, acc_);
    }
    __device__ __forceinline__ void store(Turned* turned) const {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) turn(acc_[0][i], acc_[1][i], turned[i]);
    }

 private:
    Accumulators<kColumns> acc_ = {};
};

template <typename T, class Products>
__global__ __launch_bounds__(kBlockThreads,
                             Products::kBlocksOnSm) void sm80_w4a16_small(__grid_constant__ SmallArgs<T> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t small_shared[];
    __shared__ uint64_t ring_barriers[Rings<kWarps>::kBarriers];
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const tile = blockIdx.x;
    int const chunks = args.shape.chunks;
    Rings<kWarps> const rings(small_shared, ring_barriers, args.shape.stages);
    uint8_t* const panel = small_shared + kWarps * args.shape.stages * kStageBytes;
    if (lane == 0 && warp < kWarps) rings.init(warp);
    __syncthreads();
    if (warp >= kWarps) {
        constexpr int kRings = kWarps / kFillers;
        int const first = uniform(warp - kWarps) * kRings;
        TileCopies copies[kRings];
#pragma unroll
        for (int i = 0; i < kRings; ++i) {
            copies[i] = TileCopies({args.codes, args.scales, args.rows, args.k, tile, first + i, chunks, kWarps});
        }
        RingPosition at;
        fill<true>(args.in_flight, rings, at, first, copies, args.shape.stages);
        return;
    }
    int const row = tile / kTilesPerGroup * 128 + lane / 8 * 32 + tile % kTilesPerGroup * 8 + lane % 8;
    float tensor_scale = 0.0f;
    T bias{};
    if (warp < args.m && row < args.rows) {
        tensor_scale = *args.tensor_scale;
        bias = args.bias[row];
    }
    Products::clear(args, panel);
    wait_for_kernels_before();
    let_next_kernel_start();

    Products::stage(args, panel);
    __syncwarp();
    Products products;
    RingPosition at;
    // All stages, so that nothing still arrives once the block has gone.
#pragma unroll 1
    for (int chunk = warp; chunk < args.shape.stages * kWarps; chunk += kWarps) {
        uint8_t const* const stage = rings.acquire(warp, at);
        if (chunk < chunks) products.multiply(stage, panel + chunk * Products::chunk_bytes(args.m), args);
        at.advance(args.shape.stages);
    }
    // Where the warp's weights were. It alone has read these.
    auto const turned = [&](int of_warp) { return reinterpret_cast<Turned*>(small_shared + of_warp * kStageBytes); };
    static_assert(2 * sizeof(Turned) <= kStageBytes);
    __syncwarp();
    products.store(turned(warp));
    meet();
    for (int token = warp; token < args.m && row < args.rows; token += kWarps) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) sum += turned(i)[token / 8][token % 8][lane];
        float const value = fmaf(sum, tensor_scale * static_cast<float>(1 << Products::kShift), ptx::to_float(bias));
        args.y[static_cast<int64_t>(token) * args.rows + row] =
            ptx::from_float<T>(activate_one(args.activation, value));
    }
}

}  // namespace trt_nvfp4::w4a16
