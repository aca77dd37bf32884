// The W4A4 GEMMs of mixtures of experts (experts_scheduler.cuh) around the main loops of all architectures.
#pragma once

#include "device/sm_count.h"
#include "moe/experts_scheduler.cuh"
#include "w4a4/w4a4_epilogue.cuh"
#include "w4a4/w4a4_experts.h"
#include "w4a4/w4a4_launch.cuh"

namespace trt_nvfp4 {

constexpr int kW4a4ExpertColumns = 128;  // of a tile

// What a tile does with its sums: those of its expert's GEMM.
struct ExpertsOutput {
    using Gemm = W4A4ExpertsGemm;

    template <int kLanes>
    __device__ __forceinline__ static void store(W4A4ExpertsGemm const& experts, Fragment<kLanes>& values, int64_t row,
                                                 int64_t column0, int lane, int expert) {
        WorkItem const item = item_of_tile<kW4a4ExpertRows>(experts, static_cast<int>(row / kW4a4ExpertRows));
        W4A4Gemm gemm = experts;
        gemm.w.tensor_scale += expert;
        gemm.bias = static_cast<uint16_t const*>(experts.bias) + expert * experts.n;
        if (experts.write == ExpertsWrite::kSums) {
            scale_and_bias<kLanes>(gemm, values, column0, lane);
            gemm.m = item.first + item.count;
            PartialOutput::store<kLanes>(gemm, values, item.first + row % kW4a4ExpertRows, column0, lane, 0);
            return;
        }
        gemm.m = row / kW4a4ExpertRows * kW4a4ExpertRows + item.count;
        if (experts.write == ExpertsWrite::kGated) {
            HiddenOutput<true>::store<kLanes>(gemm, values, row, column0, lane, 0);
        } else {
            HiddenOutput<false>::store<kLanes>(gemm, values, row, column0, lane, 0);
        }
    }
};

template <class Mainloop, class Epilogue>
using W4A4ExpertsKernel = ExpertsKernel<W4A4Kernel<
    cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, typename ShareA<Mainloop>::Type, Epilogue,
                                         ExpertsScheduling<W4A4Gemm, kW4a4ExpertRows, kW4a4ExpertColumns>>>>;

template <class Kernel>
TrtNvfp4Status launch_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream) {
    using Mainloop = typename Kernel::CollectiveMainloop;
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    using Value = typename Mainloop::ElementA;
    using Scale = cutlass::float_ue4m3_t;

    auto const problem = cute::make_shape(static_cast<int>(gemm.m), static_cast<int>(gemm.n), static_cast<int>(gemm.k),
                                          static_cast<int>(gemm.experts));
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = problem;
    arguments.mainloop = {
        reinterpret_cast<Value const*>(gemm.a.packed),       cute::make_stride(gemm.k, cute::_1{}, cute::_0{}),
        reinterpret_cast<Value const*>(gemm.w.packed),       cute::make_stride(gemm.k, cute::_1{}, gemm.n * gemm.k),
        reinterpret_cast<Scale const*>(gemm.a.block_scales), share_batch(Config::tile_atom_to_shape_SFA(problem)),
        reinterpret_cast<Scale const*>(gemm.w.block_scales), Config::tile_atom_to_shape_SFB(problem)};
    arguments.epilogue = gemm;
    arguments.scheduler = {&gemm};
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&arguments.hw_info.device_id), "current device"));
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, arguments.hw_info.sm_count));
    return launch_cutlass<Kernel>(Kernel::to_underlying_arguments(arguments, nullptr), false, stream, "experts' GEMM");
}

}  // namespace trt_nvfp4
