// Multiplying a task, a tile by some chunks of K, on SM90: two warpgroups multiply what a third puts into stages
// (weights) and staged tiles (activations).
#pragma once

#include "common/divisor.h"
#include "ptx/grid.cuh"
#include "w4a16/sm90/common/weights.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kTaskThreads = 32 * (kWarps + 4);  // a whole warpgroup beside those that multiply, for its registers

// The work of a cluster: its blocks' tiles are neighbours.
struct Task {
    int tile, part;
    int begin, end;  // chunks

    __device__ __forceinline__ Task(int tile, int begin, int end) : tile(tile), part(0), begin(begin), end(end) {}
    // One of those of all tiles, whose K of so many chunks is split.
    __device__ __forceinline__ Task(int splits, Divisor by_splits, int chunks, int task) {
        int const cluster_tile = by_splits.of(task);
        part = task - cluster_tile * splits;
        tile = cluster_tile * kMaxCluster + ptx::cluster_rank();
        begin = by_splits.of(part * chunks);
        end = by_splits.of((part + 1) * chunks);
    }
};

// Activations of a chunk of K.
template <int kTokens>
constexpr int kChunkBytes = kChunk * kTokens * 2;

// kIsSync: warps multiply each for itself (kBySync). kSharers blocks of a cluster share the copies of activations: a
// warp frees a staged tile for each of them by one arrival, and without sharers by all of its lanes, which racecheck
// wants. Products by wgmma are waited for word by word, or by up to kMostWords, which takes registers.
template <class StagedTileKind, bool kIsSync, int kSharers = 1, int kMostWords = 2>
struct TaskShared {
    using StagedTile = StagedTileKind;
    static constexpr bool kSync = kIsSync;
    static constexpr int kBlocks = kSharers;
    static constexpr int kWords = StagedTile::kTokens <= 32 ? kMostWords : 1;
    static constexpr int kStagedTiles = std::min(16, 65536 / kChunkBytes<StagedTile::kTokens>);
    static constexpr int kStagedTileReleases = kWarps * (kSharers == 1 ? 32 : kSharers);

    WeightStages weights;  // first: the copy engine's pattern of 16-byte columns is one of addresses
    uint8_t staged_tiles[kStagedTiles][StagedTile::kBytes];
    uint64_t full[kStagedTiles], empty[kStagedTiles];

    // By one thread, before anything else. A staged tile is full after `fillings` arrivals.
    __device__ __forceinline__ void init(int fillings) {
        weights.init();
        for (int i = 0; i < kStagedTiles; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), fillings);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), kStagedTileReleases);
        }
        ptx::mbarrier_init_fence();
    }

    // To staged tile `stage`, which is free, by one thread. It is full once `others` bytes more have arrived.
    __device__ __forceinline__ void copy_staged_tile(int stage, uint8_t const* source, int bytes, int others = 0) {
        uint32_t const arrived = ptx::shared_address(&full[stage]);
        ptx::mbarrier_arrive_expect(arrived, bytes + others);
        ptx::bulk_copy(ptx::shared_address(staged_tiles[stage]), source, bytes, arrived);
    }
};

// Registers of the two consumer warpgroups, and what they leave the producer's, of the 168 that each starts with.
template <int kRegisters = 200>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters = 200>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(3 * 168 - 2 * kRegisters));
}

// The staged tiles, as LaneStages.
template <class Shared>
class LaneStagedTiles {
 public:
    using StagedTile = typename Shared::StagedTile;

    __device__ __forceinline__ explicit LaneStagedTiles(Shared const& shared)
        : units_(ptx::shared_address(shared.staged_tiles) + (Shared::kSync ? lane_units<StagedTile>() : 0)),
          factors_(ptx::shared_address(shared.staged_tiles) + threadIdx.x % 4 * 2 * StagedTile::kTokenBytes),
          full_(ptx::shared_address(shared.full)) {
        asm volatile("" : "+r"(units_), "+r"(factors_), "+r"(full_));
    }

    __device__ __forceinline__ void await() const { ptx::mbarrier_wait(full(), at_.round()); }
    __device__ __forceinline__ void advance() { at_.advance(); }
    // First units, by mma.sync those of this lane, and the factors of this lane's two tokens.
    __device__ __forceinline__ uint32_t units() const { return units_ + at_.index * StagedTile::kBytes; }
    __device__ __forceinline__ uint32_t factors() const { return factors_ + at_.index * StagedTile::kBytes; }
    static_assert(offsetof(Shared, empty) == offsetof(Shared, full) + Shared::kStagedTiles * sizeof(uint64_t));
    // The barrier by which the staged tile may be filled again.
    __device__ __forceinline__ uint32_t empty() const { return full() + Shared::kStagedTiles * 8; }

 private:
    __device__ __forceinline__ uint32_t full() const { return full_ + at_.index * 8; }

    Stage<Shared::kStagedTiles> at_;
    uint32_t units_, factors_, full_;
};

// Where a warp is.
template <class Shared>
struct Places {
    LaneStages weight_stages;
    LaneStagedTiles<Shared> staged_tiles;

    __device__ __forceinline__ explicit Places(Shared const& shared)
        : weight_stages(shared.weights), staged_tiles(shared) {}
};

// acc += sums of Panel::kFactorK values of K times their tokens' factors, number `which` of the staged tiles that have
// these of this lane's tokens at `factors`, and zeros to the sums. Returns what is known once the factors have been
// read.
template <class StagedTile, int kColumns, int kSums>
__device__ __forceinline__ uint32_t add_scaled(float (&sums)[2][4 * kColumns], uint32_t const (&factors)[kColumns],
                                               int which, float (&acc)[2][kSums]) {
    uint32_t read = 0;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
        float own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            own[i] = ptx::load_shared(factors[n] + i * StagedTile::kTokenBytes + StagedTile::factor_offset(which));
            read ^= __float_as_uint(own[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& sum = acc[i / 4][n * 4 + i % 4];
            sum = fmaf(sums[i / 4][n * 4 + i % 4], own[i % 2], sum);
            sums[i / 4][n * 4 + i % 4] = 0.0f;
        }
    }
    return read;
}

// As add_scaled, one token's sums of a lane's blocks.
template <class StagedTile>
__device__ __forceinline__ uint32_t add_scaled_token(float (&sums)[4], uint32_t factors, int which,
                                                     float (&acc)[2][4]) {
    float const factor = ptx::load_shared(factors + StagedTile::factor_offset(which));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float& sum = acc[i / 2][i % 2 * 2];
        sum = fmaf(sums[i], factor, sum);
        sums[i] = 0.0f;
    }
    return __float_as_uint(factor);
}

// A row's four lanes' sums to where those of token 0 lie, which is the first lane, at the scale of other products.
template <typename T>
__device__ __forceinline__ void add_lanes(float (&acc)[2][4]) {
    // Weights are doubled.
    constexpr float kScale = 0.5f / static_cast<float>(1 << w4a16::Decoder<T>::kScaleShift);
    float const scale = threadIdx.x % 4 == 0 ? kScale : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float& sum = acc[i / 2][i % 2 * 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sum *= scale;
    }
}

// A warp's rows of a task of so many chunks times the activations of kTokens tokens, to the first sums of `acc`.
template <typename T, int kTokens, class Shared, int kSums>
__device__ __forceinline__ void multiply_task(int chunks, uint32_t one, Places<Shared>& at, float (&acc)[2][kSums]) {
    constexpr int kGroups = kChunk / kGroup;
    using StagedTile = typename Shared::StagedTile;
    constexpr int kStagedTileTokens = StagedTile::kTokens;
    constexpr bool kOne = kStagedTileTokens == 1;
    constexpr int kOfChunk = (kTokens + kStagedTileTokens - 1) / kStagedTileTokens;  // staged tiles
    constexpr int kColumns = kSumTokens<kTokens> / 8;
    static_assert(Shared::kSync || kOfChunk == 1);
    uint32_t const own_byte = own_scale_byte();
    auto const release_staged_tile = [&](uint32_t empty, uint32_t read = 0) {
        empty += zero_behind(read, one);
        if constexpr (Shared::kBlocks == 1) {
            ptx::mbarrier_arrive(empty);
        } else {
            int const lane = threadIdx.x % 32;
            if (lane < Shared::kBlocks) ptx::mbarrier_arrive_at(empty, lane);
        }
    };
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) acc[0][i] = acc[1][i] = 0.0f;
    if (chunks == 0) return;
    uint32_t finished = 0;  // the barrier of the staged tile whose multiplications may still be in flight
    // Codes are a group ahead of their products.
    at.weight_stages.await();
    Codes next = at.weight_stages.load_group(0);
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        uint32_t units[kColumns], factors[kColumns], empty[kOfChunk];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            int const offset = n * 8 % kStagedTileTokens * StagedTile::kTokenBytes;
            if (offset == 0) {
                at.staged_tiles.await();
                empty[n * 8 / kStagedTileTokens] = at.staged_tiles.empty();
            }
            units[n] = at.staged_tiles.units() + offset;
            factors[n] = at.staged_tiles.factors() + offset;
            if ((n + 1) * 8 % kStagedTileTokens == 0 || n + 1 == kColumns) at.staged_tiles.advance();
        }
        uint32_t read = 0;
        float unscaled[2][4 * kColumns] = {};
        float of_token[4] = {};
        uint64_t b = 0;
        if constexpr (!Shared::kSync)
            b = ptx::uniform_descriptor(units[0], StagedTile::kUnitBytes, StagedTile::kColumnBytes);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            Codes const codes = next;
            if (group + 1 < kGroups) {
                next = at.weight_stages.load_group(group + 1);
            } else {
                at.weight_stages.release(zero_behind(codes, one));
                at.weight_stages.advance();
                if (left > 1) at.weight_stages.await();
                next = at.weight_stages.load_group(0, left > 1);
            }
            constexpr int kOfFactor = StagedTile::kFactorK / kGroup;
            if constexpr (kOne) {
                read = multiply_group_token<StagedTile>(codes, own_byte, one,
                                                        units[0] + group * StagedTile::kGroupBytes, of_token);
                if (group % kOfFactor == kOfFactor - 1) {
                    read ^= add_scaled_token<StagedTile>(of_token, factors[0], group / kOfFactor, acc);
                }
            } else if constexpr (StagedTile::kFactorK > 0) {
                read = multiply_group_sync<__half, StagedTile>(codes, own_byte, one, units,
                                                               group * StagedTile::kGroupBytes, unscaled);
                if (group % kOfFactor == kOfFactor - 1) {
                    read ^= add_scaled<StagedTile>(unscaled, factors, group / kOfFactor, acc);
                }
            } else if constexpr (Shared::kSync) {
                read = multiply_group_sync<T, StagedTile>(codes, own_byte, one, units, group * StagedTile::kGroupBytes,
                                                          acc);
            } else {
                multiply_group<T, StagedTile, kTokens, Shared::kWords>(
                    codes, own_byte, one, ptx::advance(b, group * StagedTile::kGroupBytes), acc, [&](int word) {
                        // All but this word's have finished: the staged tile before is free.
                        if (word == 0 && group == 0 && left < chunks) release_staged_tile(finished);
                    });
            }
        }
        if constexpr (Shared::kSync) {
#pragma unroll
            for (uint32_t const barrier : empty) release_staged_tile(barrier, read);
        } else {
            finished = empty[0];
        }
    }
    if constexpr (kOne) add_lanes<T>(acc);
    if constexpr (!Shared::kSync) {
        ptx::wgmma_wait<0>();
        for (auto& sums : acc) ptx::wgmma_finished(*reinterpret_cast<float (*)[4 * kColumns]>(&sums));
        release_staged_tile(finished);
    }
}

// Instead of multiply_task by warps that have no rows of it: they free what they share with others, `columns` staged
// tiles a chunk.
template <class Shared>
__device__ __forceinline__ void pass_over_task(int chunks, int columns, Places<Shared>& at) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        at.weight_stages.await();
        at.weight_stages.release();
        at.weight_stages.advance();
#pragma unroll 1
        for (int i = 0; i < columns; ++i) {
            at.staged_tiles.await();
            ptx::mbarrier_arrive(at.staged_tiles.empty());
            at.staged_tiles.advance();
        }
    }
}

}  // namespace trt_nvfp4::sm90
