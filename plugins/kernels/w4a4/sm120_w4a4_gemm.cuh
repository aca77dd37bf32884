// W4A4 GEMM on SM120 and SM121: CUTLASS's TMA-fed mma.sync main loop for block-scaled operands, our epilogue. 128x128
// tiles, two warp groups sharing one, persistent CTAs.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "w4a4/w4a4_epilogue.cuh"
#include "w4a4/w4a4_launch.cuh"

namespace trt_nvfp4::sm120 {

using TileShape = cute::Shape<cute::_128, cute::_128, cute::_128>;
using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
constexpr int kAlignment = 32;  // values: 16 bytes

using BuiltMainloop =
    cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp,
                                                 Operand, cutlass::layout::RowMajor, kAlignment, Operand,
                                                 cutlass::layout::ColumnMajor, kAlignment, float, TileShape,
                                                 ClusterShape, cutlass::gemm::collective::StageCountAutoCarveout<0>,
                                                 cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

// Warps 4 x 2 as CUTLASS has them, but each owns 32 neighbouring columns, not 16: a whole block of hidden values.
using TiledMma = decltype(cute::make_tiled_mma(
    typename BuiltMainloop::TiledMma::Atom{}, cute::Layout<cute::Shape<cute::_4, cute::_2, cute::_1>>{},
    cute::Tile<cute::_128,
               cute::Layout<cute::Shape<cute::_8, cute::_2, cute::_4>, cute::Stride<cute::_1, cute::_32, cute::_8>>,
               cute::_64>{}));

using Mainloop = cutlass::gemm::collective::CollectiveMma<
    typename BuiltMainloop::DispatchPolicy, TileShape,
    cute::tuple<typename BuiltMainloop::ElementA, typename BuiltMainloop::ElementSF>,
    cute::tuple<typename BuiltMainloop::StrideA, typename BuiltMainloop::LayoutSFA>,
    cute::tuple<typename BuiltMainloop::ElementB, typename BuiltMainloop::ElementSF>,
    cute::tuple<typename BuiltMainloop::StrideB, typename BuiltMainloop::LayoutSFB>, TiledMma,
    typename BuiltMainloop::GmemTiledCopyPairA, typename BuiltMainloop::SmemLayoutAtomsA,
    typename BuiltMainloop::SmemCopyAtomsA, cute::identity, typename BuiltMainloop::GmemTiledCopyPairB,
    typename BuiltMainloop::SmemLayoutAtomsB, typename BuiltMainloop::SmemCopyAtomsB, cute::identity>;

// CUTLASS calls this with a warp group's accumulators in registers.
template <typename Output>
class Epilogue : public EpilogueBase<typename Output::Gemm> {
 public:
    using typename EpilogueBase<typename Output::Gemm>::Params;
    explicit CUTLASS_HOST_DEVICE Epilogue(Params const& params) : params_(params) {}

    template <class Problem, class Tile, class TileCoord, class Engine, class Layout, class Mma, class Residue>
    CUTLASS_DEVICE void operator()(Problem const&, Tile const& tile, TileCoord const& tile_coord,
                                   cute::Tensor<Engine, Layout> const& accumulators, Mma mma, Residue const&,
                                   int thread, char*) const {
        using namespace cute;
        auto const coordinates = mma.get_slice(thread).partition_C(make_identity_tensor(take<0, 2>(tile)));
        static_assert(decltype(size<0>(accumulators))::value == 4, "an m16n8 fragment: two rows, two columns");
        static_assert(decltype(size<2>(accumulators))::value % 4 == 0, "a warp owns whole groups of 32 columns");
        int const lane = thread % 4;
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < size<2>(accumulators); n += 4) {
            CUTLASS_PRAGMA_UNROLL
            for (int m = 0; m < size<1>(accumulators); ++m) {
                CUTLASS_PRAGMA_UNROLL
                for (int half = 0; half < 2; ++half) {
                    Fragment<4> values;
                    CUTLASS_PRAGMA_UNROLL
                    for (int i = 0; i < 8; ++i) values[i] = accumulators(2 * half + i % 2, m, n + i / 2);
                    auto const first = coordinates(2 * half, m, n);
                    Output::template store<4>(params_, values, get<0>(tile_coord) * get<0>(tile) + get<0>(first),
                                              get<1>(tile_coord) * get<1>(tile) + get<1>(first) - 2 * lane, lane,
                                              get<3>(tile_coord));
                }
            }
        }
    }

 private:
    Params const& params_;
};

template <typename Output>
using Kernel = W4A4Kernel<cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, Mainloop,
    cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Epilogue<Output>>, void>>;

}  // namespace trt_nvfp4::sm120
