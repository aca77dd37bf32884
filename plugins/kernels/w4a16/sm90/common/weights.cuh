// Weights in flight to wgmma's warpgroups, by the copy engine: a ring in shared memory of stages that hold a
// warpgroup's 128 rows of a chunk of K, in turn for the one and the other.
//
// What sm80_w4a16_ring.cuh says of copies in flight holds here too. A thread fills: what other warps spend on copies
// they would take from the decoding, whose pipes are the bottleneck.
#pragma once

#include <cstddef>

#include "formats/scale_layout.cuh"
#include "heuristics/sm90_w4a16.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "w4a16/sm90/common/product.cuh"
#include "w4a16/stream/sm80_w4a16_ring.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarpgroups = 2;
constexpr int kWarps = 4 * kWarpgroups;  // that multiply
constexpr int kGroupRows = 128;          // of a warpgroup
constexpr int kWeightStages = 8;         // a power of two, and a multiple of kWarpgroups
constexpr int kStageCodes = kGroupRows * kChunk / 2;
constexpr int kStageScales = kGroupRows * kChunk / kBlock;
static_assert(kTileRows == kWarpgroups * kGroupRows);

// Boxes of a matrix of all layers: a stage's codes, 16-byte columns c of row r being c ^ r % 8, and its scales, which
// are tiles of 128 rows and 4 blocks.
struct WeightMaps {
    CUtensorMap codes;   // [layers * rows, K / 2] bytes
    CUtensorMap scales;  // [layers * groups of rows, tiles of K, 128] words
    int rows, groups;    // of a layer
    bool whole_lines;  // a chunk of a row is whole lines of memory, which only an expert's other work items read again
};

// A stage's bytes to L2, by one thread.
__device__ __forceinline__ void prefetch_stage(WeightMaps const& maps, int layer, int group, int chunk) {
    ptx::tensor_prefetch(maps.codes, chunk * (kChunk / 2), layer * maps.rows + group * kGroupRows);
    ptx::tensor_prefetch(maps.scales, 0, chunk * (kChunk / kGroup), layer * maps.groups + group);
}

struct WeightStages {
    uint8_t codes[kWeightStages][kStageCodes];
    uint8_t scales[kWeightStages][kStageScales];
    uint64_t full[kWeightStages], empty[kWeightStages];

    // By one thread, before anything else.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kWeightStages; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), kGroupRows);  // its warpgroup's threads
        }
    }
};

// StageProducer finds scales behind all codes, and a stage's other barrier behind all of the first.
static_assert(offsetof(WeightStages, scales) == kWeightStages * kStageCodes && offsetof(WeightStages, codes) == 0);
static_assert(offsetof(WeightStages, empty) == offsetof(WeightStages, full) + kWeightStages * sizeof(uint64_t));

// Where a tile's rows lie, for the copy engine: found once, not for every copy.
struct TileBoxes {
    CUtensorMap const *codes, *scales;
    int row, group;  // the first
    bool once;       // what is read is not read again

    __device__ __forceinline__ TileBoxes(WeightMaps const& maps, int layer, int tile)
        : codes(&maps.codes),
          scales(&maps.scales),
          row(layer * maps.rows + tile * kTileRows),
          group(layer * maps.groups + tile * kWarpgroups),
          once(maps.whole_lines) {
        asm volatile("" : "+l"(codes), "+l"(scales));
    }
};

// Fills stage after stage, by one thread, with as little to do between a copy's arrival and the next copy as can be:
// warps that multiply leave it few issue stages. Each call says of how many stages the copies may be in flight: the
// fewer, the less do activations wait behind weights, the more does memory wait for copies.
class StageProducer {
 public:
    __device__ __forceinline__ explicit StageProducer(WeightStages& weight_stages)
        : codes_(ptx::shared_address(weight_stages.codes)), full_(ptx::shared_address(weight_stages.full)) {
        asm volatile("" : "+r"(codes_), "+r"(full_));
    }

    // With chunk `chunk` of the rows of a tile that are warpgroup i's.
    __device__ __forceinline__ void fill(TileBoxes const& tile, int i, int chunk, uint32_t under_way) {
        await_stage();
        ptx::mbarrier_arrive_expect(full(filled_), kStageCodes + kStageScales);
        await_arrival(under_way);
        if (tile.once) {
            copy<true>(tile, i, chunk);
        } else {
            copy<false>(tile, i, chunk);
        }
        ++filled_;
    }
    // With nothing, where a warpgroup has no rows.
    __device__ __forceinline__ void pass(uint32_t under_way) {
        await_stage();
        ptx::mbarrier_arrive(full(filled_));
        await_arrival(under_way);
        ++filled_;
    }

 private:
    template <bool kOnce>
    __device__ __forceinline__ void copy(TileBoxes const& tile, int i, int chunk) {
        uint32_t const weight_stage = filled_ % kWeightStages, arrived = full(filled_);
        ptx::tensor_copy<kOnce>(codes_ + weight_stage * kStageCodes, *tile.codes, chunk * (kChunk / 2),
                                tile.row + i * kGroupRows, arrived);
        ptx::tensor_copy<kOnce>(codes_ + kWeightStages * kStageCodes + weight_stage * kStageScales, *tile.scales, 0,
                                chunk * (kChunk / kGroup), tile.group + i, arrived);
    }
    // The barrier of the stage that is filled as number `which`, and how often that has been before, modulo two.
    __device__ __forceinline__ uint32_t full(uint32_t which) const { return full_ + which % kWeightStages * 8; }
    static __device__ __forceinline__ uint32_t round(uint32_t which) { return which / kWeightStages & 1; }

    __device__ __forceinline__ void await_stage() const {
        ptx::mbarrier_wait(full(filled_) + kWeightStages * 8, round(filled_) ^ 1);
    }
    // Returns once fewer stages are in flight than may be; at once while the ring is empty.
    __device__ __forceinline__ void await_arrival(uint32_t under_way) const {
        ptx::mbarrier_wait(full(filled_ - under_way), round(filled_ - under_way));
    }

    uint32_t codes_, full_;  // shared addresses
    uint32_t filled_ = 0;
};

// A lane multiplies one row of each quarter of a warpgroup's rows; eight lanes' are the warp's. Lanes that read shared
// memory at once, of neighbouring g, have every second, which lie in other banks.
__device__ __forceinline__ int row_of_lane(int warp = threadIdx.x / 32) {
    int const g = threadIdx.x % 32 / 4;
    return warp % 4 * 8 + g % 4 * 2 + g / 4;
}

// A place in a ring of kStages, and how often it has been there before, modulo two. Opaque, so that all addresses
// follow from it by one multiplication each.
template <int kStages>
struct Stage {
    static_assert((kStages & (kStages - 1)) == 0);

    uint32_t passed = 0, index = 0;

    __device__ __forceinline__ uint32_t round() const { return passed / kStages & 1; }
    __device__ __forceinline__ void advance() {
        index = ++passed % kStages;
        asm volatile("" : "+r"(index));
    }
};

// A warpgroup's stages, which are every second: shared addresses of what this lane reads of the first. Opaque too: the
// compiler would find them anew for every chunk.
class LaneStages {
 public:
    __device__ __forceinline__ explicit LaneStages(WeightStages const& weight_stages) {
        int const warpgroup = threadIdx.x / 128, row = row_of_lane(), t = threadIdx.x % 4;
        uint32_t const codes = ptx::shared_address(weight_stages.codes[warpgroup]) + row * (kChunk / 2) + t % 2 * 8;
#pragma unroll
        for (int group = 0; group < kChunk / kGroup; ++group) {
            codes_[group] = codes + ((group * 2 + t / 2) ^ row % 8) * 16;
            asm volatile("" : "+r"(codes_[group]));
        }
        scales_ = ptx::shared_address(weight_stages.scales[warpgroup]) + row * 16;
        full_ = ptx::shared_address(&weight_stages.full[warpgroup]);
        asm volatile("" : "+r"(scales_), "+r"(full_));
    }

    __device__ __forceinline__ void await() const { ptx::mbarrier_wait(full(), at_.round()); }
    __device__ __forceinline__ void advance() { at_.advance(); }
    // Once what is added to its barrier's address is known.
    __device__ __forceinline__ void release(uint32_t zero = 0) const {
        ptx::mbarrier_arrive(full() + kWeightStages * 8 + zero);
    }
    // A group of the stage, if it is wanted.
    __device__ __forceinline__ Codes load_group(int group, bool wanted = true) const {
        Codes codes;
        uint32_t const scales = scales_ + at_.index * (kWarpgroups * kStageScales);
        uint32_t const words = codes_[group] + at_.index * (kWarpgroups * kStageCodes);
        ptx::load_shared_if(wanted, scales + group * (kGroupRows * kGroup / kBlock), codes.scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::load_shared_if(wanted, words + i * 32 * (kChunk / 2), codes.words[i]);
        return codes;
    }

 private:
    __device__ __forceinline__ uint32_t full() const { return full_ + at_.index * (kWarpgroups * 8); }

    Stage<kWeightStages / kWarpgroups> at_;
    uint32_t codes_[kChunk / kGroup], scales_, full_;
};

}  // namespace trt_nvfp4::sm90
