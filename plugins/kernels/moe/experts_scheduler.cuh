// The experts of a mixture as one batched GEMM of CUTLASS: the batch is that of the weights, all of which share operand
// A, and a tile scheduler of ours picks from it the tiles that the plan on the device names. No host round trip, no
// array of pointers, no tensor map but the launch's.
#pragma once

#include <algorithm>
#include <cutlass/gemm/collective/collective_mma.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <tuple>

#include "common/programmatic_launch.cuh"
#include "moe/experts_gemm.h"
#include "moe/moe_plan.cuh"

namespace trt_nvfp4 {

template <int kRows, class Gemm>
__device__ __forceinline__ int tiles_in_use(ExpertsGemm<Gemm> const& gemm) {
    if (gemm.items == nullptr) return static_cast<int>((gemm.m + kRows - 1) / kRows);
    return *gemm.item_count;
}

template <int kRows, class Gemm>
__device__ __forceinline__ WorkItem item_of_tile(ExpertsGemm<Gemm> const& gemm, int tile) {
    if (gemm.items != nullptr) return gemm.items[tile];
    int const first = tile * kRows;
    return {0, first, min(kRows, static_cast<int>(gemm.m) - first), 0};
}

// As many blocks as SMs, each of which walks over the tiles in steps of the grid. Static: only the device
// knows the tiles in use, and a work tile's expert is its batch.
template <class Gemm_, int kRows_, int kColumns>
class ExpertsTileScheduler : public cutlass::gemm::kernel::detail::StaticPersistentTileScheduler<
                                 ExpertsTileScheduler<Gemm_, kRows_, kColumns>> {
    using Base = cutlass::gemm::kernel::detail::StaticPersistentTileScheduler<ExpertsTileScheduler>;

 public:
    using Gemm = ExpertsGemm<Gemm_>;
    using typename Base::WorkTileInfo;
    using Pipeline = cutlass::PipelineEmpty;
    using ThrottlePipeline = cutlass::PipelineEmpty;
    static constexpr int kRows = kRows_;
    struct CLCResponse {
        uint32_t data[4];
    };
    struct SharedStorage {
        CUTLASS_DEVICE Pipeline::SharedStorage pipeline() { return {}; }
        CUTLASS_DEVICE ThrottlePipeline::SharedStorage throttle_pipeline() { return {}; }
        CUTLASS_DEVICE CLCResponse* data() { return nullptr; }
    };
    struct Arguments {
        Gemm const* gemm;
    };
    struct Params : Base::Params {
        Gemm gemm;
        int tiles_n;
    };

    // The families of kernels give different arguments in front of ours.
    template <class... Given>
    static Params to_underlying_arguments(Given const&... given) {
        Params params{};
        params.gemm = *std::get<Arguments const&>(std::tie(given...)).gemm;
        params.tiles_n = static_cast<int>((params.gemm.n + kColumns - 1) / kColumns);
        return params;
    }
    template <class Problem, class Accumulator, class... Given>
    static size_t get_workspace_size(Given const&...) {
        return 0;
    }

    CUTLASS_DEVICE explicit ExpertsTileScheduler(Params const& params)
        : params_(params), index_(static_cast<int>(blockIdx.x)) {}
    CUTLASS_DEVICE ExpertsTileScheduler(CLCResponse*, Params const& params, dim3) : ExpertsTileScheduler(params) {}

    CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_tile(index_); }
    CUTLASS_DEVICE void advance_to_next_work(uint32_t steps = 1) { index_ += static_cast<int>(gridDim.x * steps); }
    CUTLASS_DEVICE bool is_last_tile(WorkTileInfo const&, uint32_t steps = 1) const {
        return index_ + static_cast<int>(gridDim.x * steps) >= tiles_in_use<kRows>(params_.gemm) * params_.tiles_n;
    }

    template <class Cluster>
    CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
        return get_current_work();
    }

    template <class... Pipelines>
    CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&, Pipelines const&...) {
        advance_to_next_work();
        return cute::make_tuple(get_current_work(), true);
    }

    using Base::fixup;
    template <bool kComplex, class Mma, class Accumulators, class AccumulatorPipeline, class State, class Copy>
    CUTLASS_DEVICE State fixup(Mma const&, WorkTileInfo const&, Accumulators const&, AccumulatorPipeline, State state,
                               Copy) const {
        return state;
    }

 private:
    // Blocks that run at a time read the same weights for neighbouring work items, which mostly are one expert's. How
    // many work items there are is read again for each tile: kept in a register, it would be spilled.
    CUTLASS_DEVICE WorkTileInfo work_tile(int index) const {
        constexpr int kStripe = 8;  // work items
        int const items = tiles_in_use<kRows>(params_.gemm);
        if (index >= items * params_.tiles_n) return WorkTileInfo::invalid_work_tile();
        int const stripe = index / (kStripe * params_.tiles_n);
        int const local = index - stripe * kStripe * params_.tiles_n;
        int const height = min(kStripe, items - stripe * kStripe);
        int const tile = stripe * kStripe + local % height;
        return {tile, local / height, item_of_tile<kRows>(params_.gemm, tile).expert, true};
    }

    Params const& params_;
    int index_;
};

// Chooses the scheduler above.
template <class Gemm, int kRows, int kColumns>
struct ExpertsScheduling {};

}  // namespace trt_nvfp4

template <class Gemm, int kRows, int kColumns, class Arch, class Tile, class Cluster, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<trt_nvfp4::ExpertsScheduling<Gemm, kRows, kColumns>, Arch,
                                                            Tile, Cluster, kStages, void> {
    using Scheduler = trt_nvfp4::ExpertsTileScheduler<Gemm, kRows, kColumns>;
};

namespace trt_nvfp4 {

// A layout's batch of stride 0.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto share_batch(Layout const& layout) {
    return cute::make_layout(cute::shape(layout),
                             cute::replace<2>(cute::stride(layout), cute::Stride<cute::_0, cute::_0>{}));
}

using SharedStride = cute::Stride<int64_t, cute::_1, cute::_0>;

// A main loop that reads the same A for every batch. A stride that is 0 at compile time never gets into a tensor map.
template <class Mainloop>
struct ShareA;

template <class Policy, class Tile, class A, class StrideA, class LayoutA, class... Rest>
struct ShareA<cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, cute::tuple<StrideA, LayoutA>, Rest...>> {
    using Type = cutlass::gemm::collective::CollectiveMma<
        Policy, Tile, A, cute::tuple<SharedStride, decltype(share_batch(std::declval<LayoutA>()))>, Rest...>;
};

template <class Policy, class Tile, class A, class Row, class Column, class Batch, class... Rest>
struct ShareA<cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, cute::tuple<Row, Column, Batch>, Rest...>> {
    using Type = cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, SharedStride, Rest...>;
};

// Of CUTLASS's kernel with the scheduler above. Blocks beyond the tiles in use end at once: CUTLASS's kernel for SM100
// takes it that there is a first tile.
template <class Kernel>
struct ExpertsKernel : Kernel {
    static constexpr int kRows = Kernel::TileScheduler::kRows;

    static dim3 get_grid_shape(typename Kernel::Params const& params) {
        int64_t const tiles = (params.scheduler.gemm.m + kRows - 1) / kRows * params.scheduler.tiles_n;
        return dim3(static_cast<unsigned>(std::min<int64_t>(tiles, params.hw_info.sm_count)));
    }

    CUTLASS_DEVICE void operator()(typename Kernel::Params const& params, char* shared) {
        wait_for_kernels_before();  // that plan the tiles
        if (static_cast<int>(blockIdx.x) >= tiles_in_use<kRows>(params.scheduler.gemm) * params.scheduler.tiles_n) {
            return;
        }
        Kernel::operator()(params, shared);
    }
};

}  // namespace trt_nvfp4
