// Weights on their way to wgmma's warpgroups, by the copy engine: a ring in shared memory of slots that hold a
// warpgroup's 128 rows of a chunk of K, in turn for the one and the other.
//
// What sm80_w4a16_ring.cuh says of copies under way holds here too. A thread fills: what other warps spend on copies
// they would take from the decoding, whose pipes are the bottleneck.
#pragma once

#include "heuristics/sm90_w4a16.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "scale_layout.cuh"
#include "sm80_w4a16_ring.cuh"
#include "sm90_w4a16_product.cuh"

namespace trt_nvfp4::sm90 {

constexpr int kWarpgroups = 2;
constexpr int kGroupRows = 128;  // of a warpgroup
constexpr int kSlots = 8;        // a multiple of kWarpgroups
constexpr int kSlotCodes = kGroupRows * kChunk / 2;
constexpr int kSlotScales = kGroupRows * kChunk / kBlock;
static_assert(kTileRows == kWarpgroups * kGroupRows);

// Boxes of a matrix of all layers: a slot's codes, 16-byte columns c of row r being c ^ r % 8, and its scales, which
// are tiles of 128 rows and 4 blocks.
struct WeightMaps {
    CUtensorMap codes;   // [layers * rows, K / 2] bytes
    CUtensorMap scales;  // [layers * groups of rows, tiles of K, 128] words
    int rows, groups;    // of a layer
    bool whole_lines;    // a chunk of a row is whole lines of memory, which only an expert's other jobs read again
};

// A slot's bytes to L2, by one thread.
__device__ __forceinline__ void prefetch_slot(WeightMaps const& maps, int layer, int group, int chunk) {
    ptx::tensor_prefetch(maps.codes, chunk * (kChunk / 2), layer * maps.rows + group * kGroupRows);
    ptx::tensor_prefetch(maps.scales, 0, chunk * (kChunk / kGroup), layer * maps.groups + group);
}

struct WeightSlots {
    uint8_t codes[kSlots][kSlotCodes];
    uint8_t scales[kSlots][kSlotScales];
    uint64_t full[kSlots], empty[kSlots];

    // By one thread, before anything else.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), kGroupRows);  // its warpgroup's threads
        }
    }
};

// Where a tile's rows lie, for the copy engine: found once, not for every copy.
struct TileBoxes {
    WeightMaps const& maps;
    int row, group;  // the first
    bool once;       // what is read is not read again

    __device__ __forceinline__ TileBoxes(WeightMaps const& maps, int layer, int tile)
        : maps(maps),
          row(layer * maps.rows + tile * kTileRows),
          group(layer * maps.groups + tile * kWarpgroups),
          once(maps.whole_lines) {}
};

// Fills slot after slot, by one thread, with as little to do between a copy's arrival and the next copy as can be:
// warps that multiply leave it few issue slots. The fewer slots are under way the less do activations wait behind
// weights, the more does memory wait for copies.
class SlotFiller {
 public:
    __device__ __forceinline__ SlotFiller(WeightSlots& slots, int under_way) : slots_(slots), under_way_(under_way) {}

    // With chunk `chunk` of the rows of a tile that are warpgroup i's.
    __device__ __forceinline__ void fill(TileBoxes const& tile, int i, int chunk) {
        uint32_t const full = await_slot();
        ptx::mbarrier_arrive_expect(full, kSlotCodes + kSlotScales);
        await_arrival();
        if (tile.once) {
            copy<true>(tile, i, chunk, full);
        } else {
            copy<false>(tile, i, chunk, full);
        }
        next_.advance(kSlots);
    }
    // With nothing, where a warpgroup has no rows.
    __device__ __forceinline__ void pass() {
        ptx::mbarrier_arrive(await_slot());
        await_arrival();
        next_.advance(kSlots);
    }

 private:
    template <bool kOnce>
    __device__ __forceinline__ void copy(TileBoxes const& tile, int i, int chunk, uint32_t full) {
        ptx::tensor_copy<kOnce>(ptx::shared_address(slots_.codes[next_.stage]), tile.maps.codes, chunk * (kChunk / 2),
                                tile.row + i * kGroupRows, full);
        ptx::tensor_copy<kOnce>(ptx::shared_address(slots_.scales[next_.stage]), tile.maps.scales, 0,
                                chunk * (kChunk / kGroup), tile.group + i, full);
    }
    __device__ __forceinline__ uint32_t await_slot() {
        ptx::mbarrier_wait(ptx::shared_address(&slots_.empty[next_.stage]), next_.round ^ 1);
        return ptx::shared_address(&slots_.full[next_.stage]);
    }
    // Returns once fewer slots are under way than may be.
    __device__ __forceinline__ void await_arrival() {
        if (filled_ < under_way_) {
            ++filled_;
            return;
        }
        ptx::mbarrier_wait(ptx::shared_address(&slots_.full[oldest_.stage]), oldest_.round);
        oldest_.advance(kSlots);
    }

    WeightSlots& slots_;
    int const under_way_;
    w4a16::RingPosition next_, oldest_;
    int filled_ = 0;
};

// Of each quarter of a warpgroup's rows a lane multiplies one, eight lanes' being the warp's. Lanes that read shared
// memory at once, of neighbouring g, have every second, which lie in other banks.
__device__ __forceinline__ int row_of_lane(int warp = threadIdx.x / 32) {
    int const g = threadIdx.x % 32 / 4;
    return warp % 4 * 8 + g % 4 * 2 + g / 4;
}

__device__ __forceinline__ Codes load_group(WeightSlots const& slots, int slot, int row, int group) {
    int const t = threadIdx.x % 4;
    int const column = (group * 2 + t / 2) ^ row % 8;
    return load_codes(slots.scales[slot] + group * 512 + row * 16,
                      slots.codes[slot] + row * (kChunk / 2) + column * 16 + t % 2 * 8, 32 * (kChunk / 2));
}

// Of a slot, once it has been filled, for the time of `round`.
__device__ __forceinline__ Codes first_group(WeightSlots const& slots, int slot, uint32_t round, int row) {
    ptx::mbarrier_wait(ptx::shared_address(&slots.full[slot]), round);
    return load_group(slots, slot, row, 0);
}

}  // namespace trt_nvfp4::sm90
