// The experts of a mixture as one batched GEMM of CUTLASS: the batch is that of the weights, all of which share operand
// A, and a tile scheduler of ours picks from it the tiles that the plan on the device names. No host round trip, no
// array of pointers, no tensor map but the launch's.
#pragma once

#include <algorithm>
#include <cutlass/gemm/collective/collective_mma.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <tuple>

#include "moe_plan.cuh"
#include "w4a4_epilogue.cuh"
#include "w4a4_experts.h"
#include "w4a4_launch.cuh"

namespace trt_nvfp4 {

constexpr int kExpertColumns = 128;  // of a tile

__device__ __forceinline__ int tiles_in_use(W4A4ExpertsGemm const& gemm) {
    if (gemm.jobs == nullptr) return static_cast<int>((gemm.m + kExpertRows - 1) / kExpertRows);
    return *gemm.job_count;
}

__device__ __forceinline__ ExpertJob job_of_tile(W4A4ExpertsGemm const& gemm, int tile) {
    if (gemm.jobs != nullptr) return gemm.jobs[tile];
    int const first = tile * kExpertRows;
    return {0, first, min(kExpertRows, static_cast<int>(gemm.m) - first), 0};
}

// What a tile does with its sums: those of its expert's GEMM.
struct ExpertsOutput {
    using Gemm = W4A4ExpertsGemm;

    template <int kLanes>
    __device__ __forceinline__ static void store(W4A4ExpertsGemm const& experts, Fragment<kLanes>& values, int64_t row,
                                                 int64_t column0, int lane, int expert) {
        ExpertJob const job = job_of_tile(experts, static_cast<int>(row / kExpertRows));
        W4A4Gemm gemm = experts;
        gemm.w.tensor_scale += expert;
        gemm.bias = static_cast<uint16_t const*>(experts.bias) + expert * experts.n;
        if (experts.write == ExpertsWrite::kSums) {
            scale_and_bias<kLanes>(gemm, values, column0, lane);
            gemm.m = job.first + job.count;
            PartialOutput::store<kLanes>(gemm, values, job.first + row % kExpertRows, column0, lane, 0);
            return;
        }
        gemm.m = row / kExpertRows * kExpertRows + job.count;
        if (experts.write == ExpertsWrite::kGated) {
            HiddenOutput<true>::store<kLanes>(gemm, values, row, column0, lane, 0);
        } else {
            HiddenOutput<false>::store<kLanes>(gemm, values, row, column0, lane, 0);
        }
    }
};

// As many blocks as SMs, each of which walks over the tiles in steps of the grid. Static: the tiles in use are known to
// the device alone, and a work tile's expert is its batch.
class ExpertsTileScheduler : public cutlass::gemm::kernel::detail::StaticPersistentTileScheduler<ExpertsTileScheduler> {
    using Base = cutlass::gemm::kernel::detail::StaticPersistentTileScheduler<ExpertsTileScheduler>;

 public:
    using Pipeline = cutlass::PipelineEmpty;
    using ThrottlePipeline = cutlass::PipelineEmpty;
    struct CLCResponse {
        uint32_t data[4];
    };
    struct SharedStorage {
        CUTLASS_DEVICE Pipeline::SharedStorage pipeline() { return {}; }
        CUTLASS_DEVICE ThrottlePipeline::SharedStorage throttle_pipeline() { return {}; }
    };
    struct Arguments {
        W4A4ExpertsGemm const* gemm;
    };
    struct Params : Base::Params {
        W4A4ExpertsGemm gemm;
        int tiles_n;
    };

    // The two families of kernels give different arguments in front of ours.
    template <class... Given>
    static Params to_underlying_arguments(Given const&... given) {
        Params params{};
        params.gemm = *std::get<Arguments const&>(std::tie(given...)).gemm;
        params.tiles_n = static_cast<int>((params.gemm.n + kExpertColumns - 1) / kExpertColumns);
        return params;
    }
    template <class Problem, class Accumulator, class... Given>
    static size_t get_workspace_size(Given const&...) {
        return 0;
    }

    CUTLASS_DEVICE explicit ExpertsTileScheduler(Params const& params)
        : params_(params), jobs_(tiles_in_use(params.gemm)), index_(static_cast<int>(blockIdx.x)) {}
    CUTLASS_DEVICE ExpertsTileScheduler(CLCResponse*, Params const& params, dim3) : ExpertsTileScheduler(params) {}

    template <class Cluster>
    CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
        return work_tile();
    }

    template <class... Pipelines>
    CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&, Pipelines const&...) {
        index_ += static_cast<int>(gridDim.x);
        return cute::make_tuple(work_tile(), true);
    }

    using Base::fixup;
    template <bool kComplex, class Mma, class Accumulators, class AccumulatorPipeline, class State, class Copy>
    CUTLASS_DEVICE State fixup(Mma const&, WorkTileInfo const&, Accumulators const&, AccumulatorPipeline, State state,
                               Copy) const {
        return state;
    }

 private:
    // Blocks that run at a time read the same weights for neighbouring jobs, which mostly are one expert's.
    CUTLASS_DEVICE WorkTileInfo work_tile() const {
        constexpr int kStripe = 8;  // jobs
        if (index_ >= jobs_ * params_.tiles_n) return WorkTileInfo::invalid_work_tile();
        int const stripe = index_ / (kStripe * params_.tiles_n);
        int const local = index_ - stripe * kStripe * params_.tiles_n;
        int const height = min(kStripe, jobs_ - stripe * kStripe);
        int const tile = stripe * kStripe + local % height;
        return {tile, local / height, job_of_tile(params_.gemm, tile).expert, true};
    }

    Params const& params_;
    int jobs_, index_;
};

struct ExpertsScheduling {};  // chooses the scheduler above

}  // namespace trt_nvfp4

template <class Arch, class Tile, class Cluster, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<trt_nvfp4::ExpertsScheduling, Arch, Tile, Cluster, kStages,
                                                            void> {
    using Scheduler = trt_nvfp4::ExpertsTileScheduler;
};

namespace trt_nvfp4 {

// A layout's batch of stride 0.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto share_batch(Layout const& layout) {
    return cute::make_layout(cute::shape(layout),
                             cute::replace<2>(cute::stride(layout), cute::Stride<cute::_0, cute::_0>{}));
}

// A main loop that reads the same A for every batch. A stride that is 0 at compile time never gets into a tensor map.
template <class Mainloop>
struct ShareA;

template <class Policy, class Tile, class A, class StrideA, class LayoutA, class... Rest>
struct ShareA<cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, cute::tuple<StrideA, LayoutA>, Rest...>> {
    using Type = cutlass::gemm::collective::CollectiveMma<
        Policy, Tile, A,
        cute::tuple<cute::Stride<int64_t, cute::_1, cute::_0>, decltype(share_batch(std::declval<LayoutA>()))>,
        Rest...>;
};

// Blocks beyond the tiles in use end at once: CUTLASS's kernel for SM100 takes it that there is a first tile.
template <class Mainloop, class Epilogue>
struct ExpertsKernel
    : W4A4Kernel<cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, typename ShareA<Mainloop>::Type,
                                                      Epilogue, ExpertsScheduling>> {
    using Base =
        W4A4Kernel<cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>,
                                                        typename ShareA<Mainloop>::Type, Epilogue, ExpertsScheduling>>;

    static dim3 get_grid_shape(typename Base::Params const& params) {
        int64_t const tiles = (params.scheduler.gemm.m + kExpertRows - 1) / kExpertRows * params.scheduler.tiles_n;
        return dim3(static_cast<unsigned>(std::min<int64_t>(tiles, params.hw_info.sm_count)));
    }

    CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* shared) {
        if (static_cast<int>(blockIdx.x) >= tiles_in_use(params.scheduler.gemm) * params.scheduler.tiles_n) return;
        Base::operator()(params, shared);
    }
};

template <class Kernel>
TrtNvfp4Status launch_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream) {
    using Mainloop = typename Kernel::CollectiveMainloop;
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    using Value = typename Mainloop::ElementA;
    using Scale = cutlass::float_ue4m3_t;
    if (gemm.m == 0) return TRT_NVFP4_SUCCESS;

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
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaDeviceGetAttribute(&arguments.hw_info.sm_count, cudaDevAttrMultiProcessorCount,
                                          arguments.hw_info.device_id),
                   "SM count"));
    return launch_cutlass<Kernel>(Kernel::to_underlying_arguments(arguments, nullptr), false, stream, "experts' GEMM");
}

}  // namespace trt_nvfp4
