// CUTLASS's SM90 main loop under programmatic launch: a block's first weights, which no kernel writes, are in flight
// while the kernels in front end.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "common/programmatic_launch.cuh"

namespace trt_nvfp4::sm90 {

// `Base`: a CollectiveMma fed by TMA. The kernel around it must not wait itself before it loads (no
// CUTLASS_ENABLE_GDC_FOR_SM90); the epilogue must before it reads or writes.
template <class Base>
class WeightsFirst : public Base {
    using Pipeline = typename Base::MainloopPipeline;
    using State = typename Base::PipelineState;
    using Cluster = typename Base::DispatchPolicy::ClusterShape;
    static constexpr int kClusterRows = cute::size<0>(Cluster{});
    static constexpr int kClusterColumns = cute::size<1>(Cluster{});

 public:
    template <class Inputs, class Tile, class KTile>
    CUTLASS_DEVICE void load(typename Base::Params const& params, Pipeline pipeline, State state, Inputs const& inputs,
                             Tile const& tile, KTile k_tile, int k_tiles, int thread, uint32_t rank,
                             typename Base::TensorStorage& shared) {
        if (first_tile_) {
            first_tile_ = false;
            int const ahead = k_tiles < Base::DispatchPolicy::Stages ? k_tiles : Base::DispatchPolicy::Stages;
            if (cute::elect_one_sync()) load_ahead(params, pipeline, state, inputs, tile, k_tile, ahead, rank, shared);
            state.advance(ahead);
            for (int i = 0; i < ahead; ++i) ++k_tile;
            k_tiles -= ahead;
        }
        Base::load(params, pipeline, state, inputs, tile, k_tile, k_tiles, thread, rank, shared);
    }

 private:
    // The first `count` stages, which are empty: weights (B) at once, activations (A) when they are there.
    template <class Inputs, class Tile, class KTile>
    CUTLASS_DEVICE static void load_ahead(typename Base::Params const& params, Pipeline& pipeline, State state,
                                          Inputs const& inputs, Tile const& tile, KTile k_tile, int count,
                                          uint32_t rank, typename Base::TensorStorage& shared) {
        using namespace cute;
        int const row = rank % kClusterRows;
        int const column = rank / kClusterRows;
        auto const a = params.tma_load_a.get_slice(column);
        auto const b = params.tma_load_b.get_slice(row);
        auto const from_a = a.partition_S(get<0>(inputs)(_, _, get<0>(tile), _, get<3>(tile)));
        auto const from_b = b.partition_S(get<1>(inputs)(_, _, get<1>(tile), _, get<3>(tile)));
        auto to_a = a.partition_D(make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{}));
        auto to_b = b.partition_D(make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{}));
        // A row of the cluster shares its rows of A, a column its columns of B.
        uint16_t row_mask = 0;
        uint16_t column_mask = 0;
        for (int i = 0; i < kClusterColumns; ++i) row_mask |= 1u << (row + i * kClusterRows);
        for (int i = 0; i < kClusterRows; ++i) column_mask |= 1u << (i + column * kClusterRows);

        State stage = state;
        KTile k = k_tile;
        for (int i = 0; i < count; ++i, ++stage, ++k) {
            pipeline.producer_acquire(stage);  // expects the bytes of both
            copy(params.tma_load_b.with(*pipeline.producer_get_barrier(stage), column_mask), from_b(_, _, _, *k),
                 to_b(_, _, _, stage.index()));
        }
        wait_for_kernels_before();
        for (int i = 0; i < count; ++i, ++state, ++k_tile) {
            copy(params.tma_load_a.with(*pipeline.producer_get_barrier(state), row_mask), from_a(_, _, _, *k_tile),
                 to_a(_, _, _, state.index()));
        }
    }

    bool first_tile_ = true;
};

}  // namespace trt_nvfp4::sm90
