// What the W4A4 kernels of all architectures share around CUTLASS's main loops.
#pragma once

#include "common/cutlass_launch.cuh"
#include "w4a4/w4a4_gemm.h"

namespace trt_nvfp4 {

// The amax pass ends at once where the hidden tensor scale is given: only the device knows.
template <class Base>
struct W4A4Kernel : Base {
    CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* shared) {
        W4A4Gemm const& gemm = params.epilogue;
        if (gemm.amax_pass && *gemm.hidden_scale != 0.0f) return;
        Base::operator()(params, shared);
    }
};

// The scales of part 0 of K as a batch of `splits`: the parts of a row of tiles follow one another.
template <class Layout>
Layout split_scales(Layout part, Layout const& whole, int splits) {
    auto const tile_row = cute::get<1>(whole.template stride<0>());
    cute::get<1>(part.template stride<0>()) = tile_row;
    cute::get<1>(part.template stride<2>()) = tile_row / splits;
    return part;
}

template <class Kernel>
TrtNvfp4Status launch_w4a4(W4A4Gemm const& gemm, cudaStream_t stream) {
    using Mainloop = typename Kernel::CollectiveMainloop;
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    using Value = typename Mainloop::ElementA;
    using Scale = cutlass::float_ue4m3_t;

    // The parts of K are a batch.
    int const m = static_cast<int>(gemm.m);
    int const n = static_cast<int>(gemm.n);
    int const k = static_cast<int>(gemm.k);
    auto const problem = cute::make_shape(m, n, k / gemm.splits, gemm.splits);
    auto const whole = cute::make_shape(m, n, k, 1);
    auto const stride = cute::make_stride(gemm.k, cute::_1{}, gemm.k / gemm.splits);
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = problem;
    arguments.mainloop = {
        reinterpret_cast<Value const*>(gemm.a.packed),
        stride,
        reinterpret_cast<Value const*>(gemm.w.packed),
        stride,
        reinterpret_cast<Scale const*>(gemm.a.block_scales),
        split_scales(Config::tile_atom_to_shape_SFA(problem), Config::tile_atom_to_shape_SFA(whole), gemm.splits),
        reinterpret_cast<Scale const*>(gemm.w.block_scales),
        split_scales(Config::tile_atom_to_shape_SFB(problem), Config::tile_atom_to_shape_SFB(whole), gemm.splits)};
    arguments.epilogue = gemm;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&arguments.hw_info.device_id), "current device"));
    return launch_cutlass<Kernel>(Kernel::to_underlying_arguments(arguments, nullptr), false, stream, "W4A4 GEMM");
}

}  // namespace trt_nvfp4
