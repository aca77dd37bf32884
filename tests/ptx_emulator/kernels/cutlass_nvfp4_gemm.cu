// D = alpha A B^T + beta C by CUTLASS: NVFP4 operands, BF16 C and D, as in CUTLASS's examples 72a and 79a.
//
// With -DGEMM_EXAMPLE="path" the example itself, whole and unmodified, provides the kernel; otherwise GEMM_ARCH (Sm100,
// Sm120), GEMM_TILE_M, _N, _K and GEMM_CLUSTER_M, _N choose one from the same builders.

#ifdef GEMM_EXAMPLE
#define main example_main
#include GEMM_EXAMPLE
#undef main
#else

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/device_memory.h"
#include "cutlass/util/packed_stride.hpp"

using namespace cute;

using ElementA = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using ElementB = ElementA;
using ElementC = cutlass::bfloat16_t;
using ElementD = ElementC;
constexpr int kAlignmentAB = 32, kAlignmentCD = 8;
using Arch = cutlass::arch::GEMM_ARCH;
using TileShape = Shape<Int<GEMM_TILE_M>, Int<GEMM_TILE_N>, Int<GEMM_TILE_K>>;
using ClusterShape = Shape<Int<GEMM_CLUSTER_M>, Int<GEMM_CLUSTER_N>, _1>;
using OperatorClass = cutlass::arch::OpClassBlockScaledTensorOp;

using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, OperatorClass, TileShape, ClusterShape, cutlass::epilogue::collective::EpilogueTileAuto, float, float, ElementC,
    cutlass::layout::RowMajor, kAlignmentCD, ElementD, cutlass::layout::RowMajor, kAlignmentCD,
    cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, OperatorClass, ElementA, cutlass::layout::RowMajor, kAlignmentAB, ElementB, cutlass::layout::ColumnMajor,
    kAlignmentAB, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename CollectiveEpilogue::SharedStorage))>,
    cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;

using GemmKernel =
    cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, void>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;
#endif

// A [m, k/2], B [n, k/2] bytes; scale factors in CUTLASS's 128x4 tiles; C, D [m, n]. Returns 0, or a cutlass::Status.
extern "C" int run_gemm(void* a, void* a_scales, void* b, void* b_scales, void* c, void* d, int m, int n, int k,
                        float alpha, float beta) {
    using Kernel = typename Gemm::GemmKernel;
    using Config = typename Kernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
    auto problem = make_shape(m, n, k, 1);
    auto stride_a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    auto stride_b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    auto stride_c = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {m, n, 1});
    auto stride_d = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    using Data = typename ElementA::DataType;
    using Scale = typename ElementA::ScaleFactorType;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<Data*>(a), stride_a, static_cast<Data*>(b), stride_b, static_cast<Scale*>(a_scales),
         Config::tile_atom_to_shape_SFA(problem), static_cast<Scale*>(b_scales),
         Config::tile_atom_to_shape_SFB(problem)},
        {{alpha, beta}, static_cast<ElementC*>(c), stride_c, static_cast<ElementD*>(d), stride_d}};
    Gemm gemm;
    auto status = gemm.can_implement(arguments);
    if (status != cutlass::Status::kSuccess) return static_cast<int>(status);
    cutlass::device_memory::allocation<uint8_t> workspace(Gemm::get_workspace_size(arguments));
    status = gemm.initialize(arguments, workspace.get());
    if (status == cutlass::Status::kSuccess) status = gemm.run();
    return static_cast<int>(status);
}
