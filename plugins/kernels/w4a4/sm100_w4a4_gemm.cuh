// W4A4 GEMM on SM100, SM103 and SM110: CUTLASS's TMA-fed tcgen05 main loop for block-scaled operands, our epilogue.
// Tiles of 128x128 by one CTA, or of 256x128 by a cluster of two that share one MMA.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "w4a4/w4a4_epilogue.cuh"
#include "w4a4/w4a4_launch.cuh"

namespace trt_nvfp4::sm100 {

using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
constexpr int kAlignment = 32;  // values: 16 bytes

template <int kCtas>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Operand, cutlass::layout::RowMajor, kAlignment,
    Operand, cutlass::layout::ColumnMajor, kAlignment, float,
    cute::Shape<cute::Int<128 * kCtas>, cute::_128, cute::_256>, cute::Shape<cute::Int<kCtas>, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<0>,
    cute::conditional_t<kCtas == 1, cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100,
                        cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100>>::CollectiveOp;

// CUTLASS calls this with a CTA's accumulators in tensor memory; a thread owns a row of them.
template <typename Output>
class Epilogue : public EpilogueBase<typename Output::Gemm> {
 public:
    using typename EpilogueBase<typename Output::Gemm>::Params;
    using typename EpilogueBase<typename Output::Gemm>::SharedStorage;
    using DispatchPolicy = cutlass::epilogue::Sm100NoSmemWarpSpecialized;
    using EpilogueTile = cute::Shape<cute::_128, cute::Int<kColumns>>;
    using CopyOpT2R = cute::SM100_TMEM_LOAD_32dp32b32x;
    static constexpr int ThreadCount = 128;
    static constexpr uint32_t TmaTransactionBytes = 0;

    CUTLASS_DEVICE Epilogue(Params const& params, SharedStorage&) : params_(params) {}

    template <bool kReuseTmem, class Pipeline, class PipelineState, class Problem, class Tile, class TileCoord,
              class Engine, class Layout>
    CUTLASS_DEVICE auto operator()(Pipeline pipeline, PipelineState state, Problem const&, Tile const& tile,
                                   TileCoord const& tile_coord, cute::Tensor<Engine, Layout> const& accumulators,
                                   SharedStorage&) const {
        using namespace cute;
        static_assert(!kReuseTmem, "accumulators of 256 columns would have to be read in alternating order");
        auto const columns = flat_divide(accumulators(make_coord(_, _), _0{}, _0{}), EpilogueTile{});
        auto const tmem_copy = make_tmem_copy(CopyOpT2R{}, columns(_, _, _0{}, _0{}));
        auto const thread_copy = tmem_copy.get_slice(threadIdx.x % ThreadCount);
        auto const source = thread_copy.partition_S(columns);
        auto const coordinates =
            thread_copy.partition_D(flat_divide(make_identity_tensor(take<0, 2>(tile)), EpilogueTile{}));
        constexpr int kGroups = decltype(size<4>(source))::value;
        static_assert(decltype(size<3>(source))::value == 1, "a thread per row");
        // Every column holds the code of all activations: unrolled, it would be most of the kernel.
        CUTLASS_PRAGMA_NO_UNROLL
        for (int group = 0; group < kGroups; ++group) {
            auto loaded = make_tensor<float>(shape(coordinates(_, _, _, _0{}, _0{})));
            static_assert(decltype(size(loaded))::value == kColumns, "a thread holds whole groups of columns");
            copy(tmem_copy, source(_, _, _, _0{}, group), loaded);
            if (group == kGroups - 1) {
                cutlass::arch::fence_view_async_tmem_load();
                pipeline.consumer_release(state);
                ++state;
            }
            Fragment<1> values;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kColumns; ++i) values[i] = loaded(i);
            auto const first = coordinates(_0{}, _0{}, _0{}, _0{}, group);
            Output::template store<1>(params_, values, get<0>(tile_coord) * get<0>(tile) + get<0>(first),
                                      get<1>(tile_coord) * get<1>(tile) + get<1>(first), 0, get<3>(tile_coord));
        }
        return cute::make_tuple(state);
    }

 private:
    Params const& params_;
};

template <typename Output, int kCtas>
using Kernel = W4A4Kernel<cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, Mainloop<kCtas>,
    cutlass::epilogue::collective::detail::Sm100TmaWarpSpecializedAdapter<Epilogue<Output>>, void>>;

}  // namespace trt_nvfp4::sm100
