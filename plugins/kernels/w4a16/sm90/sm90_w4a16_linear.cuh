// One projection of up to 64 tokens on SM90: as in sm90_w4a16_mlp.cuh, warps multiply what the copy engine puts into
// stages, by mma.sync up to 8 tokens and by wgmma beyond. The chunks of all tiles, one after another, are dealt out
// evenly, so that a block has the end of one tile and the begin of another: it writes partial sums of those, which a
// launch after it adds up in the order of K.
//
// No block waits for another. Three of the producer warps stage activations. Above 32 tokens that would take issue
// stages that decoding needs: there an earlier launch stages them in global memory, and tiles are copied.
#pragma once

#include "common/smooth_activation.cuh"
#include "formats/half_scale.cuh"
#include "ptx/elect.cuh"
#include "w4a16/sm90/common/fragment.cuh"
#include "w4a16/sm90/common/task.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kLayOutWarps = 3;  // beside the one that fetches weights

template <typename T>
struct LinearArgs {
    WeightMaps maps;
    float const* tensor_scale;
    T const* bias;
    int rows, k, m;
    TrtNvfp4Activation activation;
    T const* x;        // [m, k]
    T* y;              // [m, rows]
    float2* partials;  // [blocks, 2, warps, tokens / 8, quarters, lanes]
    int blocks;
    uint32_t one;    // 1, see shift_left
    uint8_t* image;  // of x, beyond 32 tokens: a staged tile for each chunk
};

template <typename T, int kTokens>
using LinearShared = TaskShared<ImageStagedTile<kTokens, kBecomesHalf<T, kTokens>>, kBySync<kTokens>>;

// Up to so many tokens blocks lay out activations by themselves, by warps that take turns with chunks.
constexpr int kLaidOutTokens = 32;
template <int kTokens>
constexpr bool kLaysOut = kTokens <= kLaidOutTokens;

// A warp's chunk of kColumns times 8 tokens in flight to where an image has it (sm90/common/staged_tile.cuh).
template <typename T, int kTokens, int kColumns>
struct LaidOut {
    using StagedTile = typename LinearShared<T, kTokens>::StagedTile;

    uint4 eights[kColumns][kChunk / 32];

    static __device__ __forceinline__ int token_of(int column) { return column * 8 + threadIdx.x % 32 / 4; }

    // All at once: a trip to L2 takes longer than a chunk is multiplied.
    __device__ __forceinline__ void load(LinearArgs<T> const& args, int chunk, int first_column) {
        int const first = chunk * kChunk;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            int const token = token_of(first_column + i);
            load_eights(token < args.m ? args.x + static_cast<int64_t>(token) * args.k + first : nullptr,
                        threadIdx.x % 4, args.k - first, eights[i]);
        }
    }
    __device__ __forceinline__ void store(uint8_t* staged_tile, int first_column) {
        int const t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            int const token = token_of(first_column + i);
            if constexpr (kBecomesHalf<T, kTokens>) {
                float const factor = to_half<1, 2>(eights[i]);
                int const offset = StagedTile::factor_offset(0) + token * StagedTile::kTokenBytes;
                if (t == 0) *reinterpret_cast<float*>(staged_tile + offset) = factor;
            }
            pair_eights<Operand<T, kTokens>>(eights[i]);
            store_eights(staged_tile, kTokens, token, t, eights[i]);
        }
    }
};

constexpr int kLinearImageThreads = 256;

// Before sm90_w4a16_linear of more tokens than it lays out. A warp makes a chunk of eight of them.
template <typename T, int kTokens>
__global__ __launch_bounds__(kLinearImageThreads) void sm90_w4a16_linear_image(
    __grid_constant__ LinearArgs<T> const args) {
    ptx::launch_next();
    int const warp = static_cast<int>(blockIdx.x * kLinearImageThreads + threadIdx.x) / 32;
    int const chunk = warp / (kTokens / 8), column = warp % (kTokens / 8);
    ptx::await_previous_launch();
    if (chunk * kChunk >= args.k) return;
    LaidOut<T, kTokens, 1> part;
    part.load(args, chunk, column);
    part.store(args.image + int64_t{chunk} * kChunkBytes<kTokens>, column);
}

// Which chunks of which tiles a block has.
struct Dealt {
    int chunks;   // of a tile
    int64_t all;  // chunks
    int blocks;

    template <typename T>
    __device__ __forceinline__ explicit Dealt(LinearArgs<T> const& args)
        : chunks(chunks_of(args.k)), all(int64_t{tiles_of(args.rows)} * chunks), blocks(args.blocks) {}

    __device__ __forceinline__ int begin(int block) const { return static_cast<int>(all * block / blocks); }
    // The block that has chunk `which` of all.
    __device__ __forceinline__ int block_of(int which) const {
        return static_cast<int>(((int64_t{which} + 1) * blocks - 1) / all);
    }

    // Calls f(task) for this block's tasks.
    template <typename F>
    __device__ __forceinline__ void each(F&& f) const {
        int const block = static_cast<int>(blockIdx.x), end = begin(block + 1);
#pragma unroll 1
        for (int next = begin(block); next < end;) {
            int const tile = next / chunks, first = next - tile * chunks;
            Task const task(tile, first, min(first + end - next, chunks));
            f(task);
            next += task.end - task.begin;
        }
    }
};

// Every third chunk of activations to its staged tile, by this warp.
template <typename T, int kTokens>
__device__ __forceinline__ void lay_out(LinearArgs<T> const& args, Dealt const& dealt, LinearShared<T, kTokens>& shared,
                                        int which) {
    static_assert(kLayOutWarps <= LinearShared<T, kTokens>::kStagedTiles,
                  "a barrier's parity would not tell a panel's rounds apart");
    constexpr int kColumns = kTokens < 16 ? 1 : 2;  // as many as registers hold
    w4a16::RingPosition place;
    int turn = 0;
    dealt.each([&](Task const& task) {
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(shared.kStagedTiles)) {
            if (turn++ % kLayOutWarps != which) continue;
#pragma unroll 1
            for (int column = 0; column * 8 < args.m; column += kColumns) {
                LaidOut<T, kTokens, kColumns> part;
                part.load(args, chunk, column);
                if (column == 0) {
                    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.stage]), place.round ^ 1);
                }
                part.store(shared.staged_tiles[place.stage], column);
            }
            // Tensor cores read by themselves what has been written.
            if constexpr (!LinearShared<T, kTokens>::kSync) ptx::fence_async_proxy();
            ptx::mbarrier_arrive(ptx::shared_address(&shared.full[place.stage]));
        }
    });
}

// The same from the image, all chunks by one thread.
template <typename T, int kTokens>
__device__ __forceinline__ void fetch_staged_tiles(LinearArgs<T> const& args, Dealt const& dealt,
                                                   LinearShared<T, kTokens>& shared) {
    constexpr int kBytes = kChunkBytes<kTokens>;
    w4a16::RingPosition place;
    dealt.each([&](Task const& task) {
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk, place.advance(shared.kStagedTiles)) {
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.stage]), place.round ^ 1);
            shared.copy_staged_tile(place.stage, args.image + int64_t{chunk} * kBytes, kBytes);
        }
    });
}

// What a lane's sums of a tile become: outputs of four rows, one of each quarter.
template <typename T>
__device__ __forceinline__ void store_outputs(LinearArgs<T> const& args, RowEpilogue<T> const& epilogue, int tile,
                                              int column, float (&values)[8]) {
    epilogue.apply(values);
    activate_values(args.activation, values);
    each_output(args.y, args.rows, args.m, tile, column,
                [&](T* place, int i) { *place = ptx::from_float<T>(values[i]); });
}

// Slot of a block's partial sums of a tile: those of a tile that another block began are the first.
template <typename T, int kTokens>
__device__ __forceinline__ float2* partial_sums(LinearArgs<T> const& args, int block, bool begun_before) {
    int const fragments = (block * 2 + (begun_before ? 0 : 1)) * kWarps + static_cast<int>(threadIdx.x) / 32;
    return args.partials + static_cast<int64_t>(fragments) * (kQuarters * (kTokens / 8) * 32) + threadIdx.x % 32;
}

template <typename T, int kTokens>
__device__ __forceinline__ void multiply_dealt(LinearArgs<T> const& args, Dealt const& dealt,
                                               LinearShared<T, kTokens>& shared) {
    Places at(shared);
    dealt.each([&](Task const& task) {
        float acc[2][kTokens / 2];
        bool const whole = task.begin == 0 && task.end == dealt.chunks;
        RowEpilogue<T> epilogue;
        if (whole) epilogue.load(args.tensor_scale, args.bias, args.rows, task.tile);
        multiply_task<T, kTokens>(task.end - task.begin, args.one, at, acc);
        float2* const place = partial_sums<T, kTokens>(args, static_cast<int>(blockIdx.x), task.begin > 0);
#pragma unroll 1
        for (int column = 0; column * 8 < args.m; ++column) {
            float sums[8];
            take_columns(acc, sums);
            if (whole) {
                store_outputs(args, epilogue, task.tile, column, sums);
                continue;
            }
#pragma unroll
            for (int i = 0; i < kQuarters; ++i) {
                place[(column * kQuarters + i) * 32] = make_float2(sums[2 * i], sums[2 * i + 1]);
            }
        }
    });
}

// By one thread.
template <typename T, int kTokens>
__device__ __forceinline__ void fetch_weights(LinearArgs<T> const& args, Dealt const& dealt,
                                              WeightStages& weight_stages) {
    ptx::prefetch(args.maps.codes);
    ptx::prefetch(args.maps.scales);
    constexpr int kWeightStagesUnderWay = kBySync<kTokens> ? 3 : 2;
    StageProducer producer(weight_stages);
    dealt.each([&](Task const& task) {
        TileBoxes const tile(args.maps, 0, task.tile);
#pragma unroll 1
        for (int chunk = task.begin; chunk < task.end; ++chunk) {
#pragma unroll
            for (int i = 0; i < kWarpgroups; ++i) producer.fill(tile, i, chunk, kWeightStagesUnderWay);
        }
    });
}

template <typename T, int kTokens>
__global__ __launch_bounds__(kTaskThreads, 1) void sm90_w4a16_linear(__grid_constant__ LinearArgs<T> const args) {
    extern __shared__ __align__(1024) uint8_t linear_bytes[];
    auto& shared = *reinterpret_cast<LinearShared<T, kTokens>*>(linear_bytes);
    // Uniform to the compiler too, which then keeps what all lanes share in uniform registers.
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) shared.init(kLaysOut<kTokens> ? 32 : 1);
    __syncthreads();
    Dealt const dealt(args);
    if (warp < kWarps) {
        take_registers<>();
        ptx::await_previous_launch();
        multiply_dealt<T, kTokens>(args, dealt, shared);
    } else {
        give_registers<>();
        if (warp == kWarps) {
            if (ptx::elect()) {
                fetch_weights<T, kTokens>(args, dealt, shared.weights);
                ptx::launch_next();
            }
        } else if constexpr (kLaysOut<kTokens>) {
            ptx::await_previous_launch();
            lay_out<T, kTokens>(args, dealt, shared, warp - kWarps - 1);
        } else if (warp == kWarps + 1) {
            ptx::await_previous_launch();
            ptx::fence_async_proxy_global();
            if (ptx::elect()) fetch_staged_tiles<T, kTokens>(args, dealt, shared);
        }
    }
}

// A block for each eight tokens of each tile. Where several blocks have a tile's sums, they become its outputs.
template <typename T, int kTokens>
__global__ __launch_bounds__(32 * kWarps) void sm90_w4a16_join(__grid_constant__ LinearArgs<T> const args) {
    int const columns = (args.m + 7) / 8;
    int const tile = static_cast<int>(blockIdx.x) / columns, column = static_cast<int>(blockIdx.x) % columns;
    Dealt const dealt(args);
    int const first = dealt.block_of(tile * dealt.chunks), last = dealt.block_of((tile + 1) * dealt.chunks - 1);
    RowEpilogue<T> epilogue;
    epilogue.load(args.tensor_scale, args.bias, args.rows, tile);
    ptx::launch_next();
    ptx::await_previous_launch();
    if (first == last) return;
    float sums[8] = {};
#pragma unroll 4
    for (int block = first; block <= last; ++block) {
        float2 const* const part = partial_sums<T, kTokens>(args, block, block > first) + column * kQuarters * 32;
#pragma unroll
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            float2 const two = __ldcg(part + quarter * 32);
            sums[quarter * 2] += two.x;
            sums[quarter * 2 + 1] += two.y;
        }
    }
    store_outputs(args, epilogue, tile, column, sums);
}

}  // namespace trt_nvfp4::sm90
