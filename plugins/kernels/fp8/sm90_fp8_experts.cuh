// The FP8 GEMMs of mixtures of experts (experts_scheduler.cuh) on SM90: the dense ones' main loop and tiles.
#pragma once

#include "fp8/fp8_experts.h"
#include "fp8/sm90_fp8_gemm.cuh"
#include "moe/experts_scheduler.cuh"

namespace trt_nvfp4::sm90 {

// What a tile does with its sums: those of its expert's GEMM.
template <class Output, class Config>
class ExpertsEpilogue : public EpilogueBase<Fp8ExpertsGemm> {
    static constexpr int kStep = 16 * Config::kWarps;
    using Finish = Fp8Finish<Output, Config::kColumns, Config::kRows / kStep, kStep>;

 public:
    struct SharedStorage {
        typename Finish::Staged rows[Config::kWarps];
    };

    explicit CUTLASS_HOST_DEVICE ExpertsEpilogue(Params const& params) : params_(params) {}

    template <class Problem, class Tile, class TileCoord, class Engine, class Layout, class Mma, class Residue>
    CUTLASS_DEVICE void operator()(Problem const&, Tile const&, TileCoord const& tile_coord,
                                   cute::Tensor<Engine, Layout>& accumulators, Mma, Residue const&, int thread,
                                   char* shared) const {
        using namespace cute;
        static_assert(decltype(size<2>(accumulators))::value == 1, "one instruction covers the columns");
        int const warp = thread / 32;
        int const tile = get<0>(tile_coord);
        int64_t const expert = get<3>(tile_coord);
        WorkItem const item = item_of_tile<Config::kRows>(params_, tile);
        if (16 * warp >= item.count) return;
        Fp8Gemm gemm = params_;
        gemm.w.scales += expert * params_.n;
        gemm.bias = static_cast<uint16_t const*>(params_.bias) + expert * params_.n;
        int const row0 = Output::kPadded ? tile * Config::kRows : item.first;
        gemm.m = row0 + item.count;
        Finish::run(gemm, accumulators, reinterpret_cast<SharedStorage*>(shared)->rows[warp], row0 + 16 * warp,
                    get<1>(tile_coord) * Config::kColumns);
    }

 private:
    Params const& params_;
};

template <class Output, class Config>
using ExpertsMainloop =
    typename ShareA<Mainloop<sizeof(typename ExpertsEpilogue<Output, Config>::SharedStorage), Config>>::Type;

template <class Output, class Config>
using Experts = Fp8Kernel<ExpertsKernel<cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, ExpertsMainloop<Output, Config>,
    cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<ExpertsEpilogue<Output, Config>>,
    ExpertsScheduling<Fp8Gemm, Config::kRows, Config::kColumns>>>>;

template <class Output, class Config>
TrtNvfp4Status launch_experts(Fp8ExpertsGemm const& gemm, cudaStream_t stream) {
    using Kernel = Experts<Output, Config>;
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = cute::make_shape(static_cast<int>(gemm.m), static_cast<int>(gemm.n),
                                               static_cast<int>(gemm.k), static_cast<int>(gemm.experts));
    arguments.mainloop = {
        reinterpret_cast<Value const*>(gemm.a.values), cute::make_stride(gemm.k, cute::_1{}, cute::_0{}),
        reinterpret_cast<Value const*>(gemm.w.values), cute::make_stride(gemm.k, cute::_1{}, gemm.n * gemm.k)};
    arguments.epilogue = gemm;
    arguments.scheduler = {&gemm};
    return launch_fp8<Kernel>(arguments, stream);
}

}  // namespace trt_nvfp4::sm90
