// FP8 GEMM on SM90: CUTLASS's TMA-fed, warp-specialized wgmma main loop with fast accumulation, our epilogue.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "common/cutlass_launch.cuh"
#include "device/sm_count.h"
#include "fp8/fp8_epilogue.cuh"
#include "fp8/sm90_weights_first.cuh"

namespace trt_nvfp4::sm90 {

// A tile of rows x columns, in clusters that share operands, K in steps of 128. Two groups of four warps
// take turns: one multiplies while the other finishes its tile; with kWarps 8, both share a tile.
template <int kRows_, int kColumns_, int kClusterRows, int kClusterColumns, int kWarps_ = kFp8Warps>
struct Config {
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kWarps = kWarps_;
    using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::_128>;
    using Cluster = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;
    using Schedule = cute::conditional_t<kWarps == 4, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                         cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>;
};

// CUTLASS calls this with the accumulators of a tile in the registers of the warps that share it. Its batches are the
// splits of K.
template <class Output, class Config>
class Epilogue : public EpilogueBase<Fp8Gemm> {
    static constexpr int kStep = 16 * Config::kWarps;
    using Finish = Fp8Finish<Output, Config::kColumns, Config::kRows / kStep, kStep>;

 public:
    struct SharedStorage {
        typename Finish::Staged rows[Config::kWarps];
    };

    explicit CUTLASS_HOST_DEVICE Epilogue(Params const& params) : params_(params) {}

    template <class Problem, class Tile, class TileCoord, class Engine, class Layout, class Mma, class Residue>
    CUTLASS_DEVICE void operator()(Problem const&, Tile const&, TileCoord const& tile_coord,
                                   cute::Tensor<Engine, Layout>& accumulators, Mma, Residue const&, int thread,
                                   char* shared) const {
        using namespace cute;
        wait_for_kernels_before();
        static_assert(decltype(size<2>(accumulators))::value == 1, "one instruction covers the columns");
        int const column0 = get<1>(tile_coord) * Config::kColumns;
        // A cluster reaches beyond the last tile.
        if (get<0>(tile_coord) * Config::kRows >= params_.m || column0 >= params_.n) return;
        int const warp = thread / 32;
        if constexpr (Output::kSplits) {
            int64_t const tiles_n = (params_.n + Config::kColumns - 1) / Config::kColumns;
            int64_t const part = (get<0>(tile_coord) * tiles_n + get<1>(tile_coord)) * Config::kWarps + warp;
            constexpr int kCount = decltype(size(accumulators))::value;
            if (params_.splits > 1 && !add_up_splits<kCount>(params_, accumulators, part, get<3>(tile_coord))) return;
        }
        Finish::run(params_, accumulators, reinterpret_cast<SharedStorage*>(shared)->rows[warp],
                    get<0>(tile_coord) * Config::kRows + warp * 16, column0);
    }

 private:
    Params const& params_;
};

using Value = cutlass::float_e4m3_t;

// kEpilogueBytes of shared memory are the epilogue's.
template <size_t kEpilogueBytes, class Config>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Value, cutlass::layout::RowMajor, 16, Value,
    cutlass::layout::ColumnMajor, 16, float, typename Config::Tile, typename Config::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>, typename Config::Schedule>::CollectiveOp;

template <class Base>
struct Fp8Kernel : Base {
    CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* shared) {
        Fp8Gemm const& gemm = params.epilogue;
        let_next_kernel_start();
        // The amax pass ends at once where the hidden scale is given: only the device knows.
        if (gemm.amax_pass) {
            wait_for_kernels_before();
            if (*gemm.hidden_scale.given != 0.0f) return;
        }
        Base::operator()(params, shared);
    }
};

template <class Output, class Config>
using Dense = Fp8Kernel<cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>,
    WeightsFirst<Mainloop<sizeof(typename Epilogue<Output, Config>::SharedStorage), Config>>,
    cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Epilogue<Output, Config>>,
    cutlass::gemm::PersistentScheduler>>;

template <class Kernel>
TrtNvfp4Status launch_fp8(typename Kernel::Arguments arguments, cudaStream_t stream) {
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&arguments.hw_info.device_id), "current device"));
    TRT_NVFP4_RETURN_IF_ERROR(read_sms(stream, arguments.hw_info.sm_count));
    return launch_cutlass<Kernel>(Kernel::to_underlying_arguments(arguments, nullptr), true, stream, "FP8 GEMM");
}

template <class Output, class Config>
TrtNvfp4Status launch(Fp8Gemm const& gemm, cudaStream_t stream) {
    using Kernel = Dense<Output, Config>;

    int64_t const k = gemm.k / gemm.splits;
    auto const stride = cute::make_stride(gemm.k, cute::_1{}, k);
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    int64_t const rows = (gemm.m + Config::kRows - 1) / Config::kRows * Config::kRows;
    arguments.problem_shape =
        cute::make_shape(static_cast<int>(rows), static_cast<int>(gemm.n), static_cast<int>(k), gemm.splits);
    arguments.mainloop = {reinterpret_cast<Value const*>(gemm.a.values), stride,
                          reinterpret_cast<Value const*>(gemm.w.values), stride};
    arguments.epilogue = gemm;
    // Tiles that share weights run together, so that weights are read from memory once.
    arguments.scheduler.raster_order = Kernel::TileScheduler::RasterOrderOptions::AlongM;
    return launch_fp8<Kernel>(arguments, stream);
}

}  // namespace trt_nvfp4::sm90
