// FP8 GEMM on SM90: CUTLASS's TMA-fed, warp-specialized wgmma main loop with fast accumulation, our epilogue.
#pragma once

// Before CUTLASS's headers: its kernels then wait for the one before them themselves.
#define CUTLASS_ENABLE_GDC_FOR_SM90

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "fp8_epilogue.cuh"
#include "programmatic_launch.cuh"

namespace trt_nvfp4::sm90 {

// Two groups of four warps take tiles in turn: one multiplies while the other finishes its tile.
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;

// A tile of rows x columns by four warps, in clusters that share operands, K in steps of 128.
template <int kRows_, int kColumns_, int kClusterRows, int kClusterColumns>
struct Config {
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::_128>;
    using Cluster = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;
};

// CUTLASS calls this with the accumulators of a tile in the registers of the warps that share it. Its batches are the
// splits of K: all but the last CTA to arrive leave their sums in memory, the last adds them up, in the splits' order.
template <class Output, class Config>
class Epilogue {
    static constexpr int kGroup = Config::kColumns < 128 ? Config::kColumns : 128;
    static constexpr int kPitch = kGroup + 4;  // keeps the columns' reads apart in the banks
    static constexpr int kThreadsAcross = kGroup / kFp8Columns;
    static constexpr int kRowsAtATime = 32 / kThreadsAcross;

 public:
    using Arguments = Fp8Gemm;
    using Params = Fp8Gemm;
    using ElementC = void;
    using ElementD = void;
    using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
    using StrideD = StrideC;
    struct SharedStorage {
        float rows[kFp8Warps][16 * kPitch];
    };

    template <class Problem>
    static Params to_underlying_arguments(Problem const&, Arguments const& arguments, void*) {
        return arguments;
    }
    template <class Problem>
    static size_t get_workspace_size(Problem const&, Arguments const&) {
        return 0;
    }
    template <class Problem>
    static bool can_implement(Problem const&, Arguments const&) {
        return true;
    }

    explicit CUTLASS_HOST_DEVICE Epilogue(Params const& params) : params_(params) {}

    template <class Problem, class Tile, class TileCoord, class Engine, class Layout, class Mma, class Residue>
    CUTLASS_DEVICE void operator()(Problem const&, Tile const&, TileCoord const& tile_coord,
                                   cute::Tensor<Engine, Layout>& accumulators, Mma, Residue const&, int thread,
                                   char* shared) const {
        using namespace cute;
        static_assert(decltype(size<2>(accumulators))::value == 1, "one instruction covers the columns");
        int const column0 = get<1>(tile_coord) * Config::kColumns;
        // A cluster reaches beyond the last tile.
        if (get<0>(tile_coord) * Config::kRows >= params_.m || column0 >= params_.n) return;
        if constexpr (Output::kSplits) {
            if (params_.splits > 1 && !add_up(accumulators, tile_coord, thread)) return;
        }

        // wgmma spreads a row over a quad of threads. A warp's 16 rows pass through shared memory, a group of columns
        // at a time, so that a thread has neighbouring columns of a row, and a short loop, rather than a long unrolled
        // text, does what is to be done.
        int const lane = thread % 32;
        int const warp = thread / 32;
        float* const staged = reinterpret_cast<SharedStorage*>(shared)->rows[warp];
        int const first_column = lane / 4 % kThreadsAcross * kFp8Columns;
        int const first_row = lane % 4 + lane / (4 * kThreadsAcross) * 4;
        float const a_scale = params_.a.scale.resolve();
        Output output(params_);
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < Config::kColumns / kGroup; ++group) {
            int const column = column0 + group * kGroup + first_column;
            Fp8ChannelValues const channels(params_, a_scale, column);
            CUTLASS_PRAGMA_UNROLL
            for (int m = 0; m < size<1>(accumulators); ++m) {
                CUTLASS_PRAGMA_UNROLL
                for (int i = 0; i < kGroup / 8; ++i) {
                    CUTLASS_PRAGMA_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        int const at = (group * kGroup / 8 + i) * 4 + 2 * half;
                        *reinterpret_cast<float2*>(staged + (lane / 4 + 8 * half) * kPitch + 8 * i + 2 * (lane % 4)) =
                            make_float2(accumulators(at, m, 0), accumulators(at + 1, m, 0));
                    }
                }
                __syncwarp();
                int const row0 = get<0>(tile_coord) * Config::kRows + m * (kFp8Warps * 16) + warp * 16;
#pragma unroll 1
                for (int i = first_row; i < 16; i += kRowsAtATime) {
                    float values[kFp8Columns];
                    CUTLASS_PRAGMA_UNROLL
                    for (int j = 0; j < kFp8Columns; j += 4) {
                        float4 const four = *reinterpret_cast<float4 const*>(staged + i * kPitch + first_column + j);
                        values[j] = fmaf(four.x, channels.scale[j], channels.bias[j]);
                        values[j + 1] = fmaf(four.y, channels.scale[j + 1], channels.bias[j + 1]);
                        values[j + 2] = fmaf(four.z, channels.scale[j + 2], channels.bias[j + 2]);
                        values[j + 3] = fmaf(four.w, channels.scale[j + 3], channels.bias[j + 3]);
                    }
                    if (row0 + i < static_cast<int>(params_.m)) output.store(values, row0 + i, column);
                }
                __syncwarp();
            }
        }
        output.finish();
    }

 private:
    // Whether this warp is the last of the splits to arrive; it then holds the sum. Warps need not wait for each
    // other: each has its own part of the tile.
    template <class TileCoord, class Accumulators>
    CUTLASS_DEVICE bool add_up(Accumulators& accumulators, TileCoord const& tile_coord, int thread) const {
        using namespace cute;
        constexpr int kVectors = decltype(size(accumulators))::value / 4;
        // That are loaded at a time: more would take the registers that the tile scheduler needs.
        constexpr int kLoads = kVectors < 16 ? kVectors : 16;
        int64_t const tiles_n = (params_.n + Config::kColumns - 1) / Config::kColumns;
        int64_t const part = (get<0>(tile_coord) * tiles_n + get<1>(tile_coord)) * kFp8Warps + thread / 32;
        float4* const sums = reinterpret_cast<float4*>(params_.partials) + part * params_.splits * kVectors * 32;
        float4* const own = sums + get<3>(tile_coord) * kVectors * 32 + thread % 32;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            __stcg(own + i * 32, make_float4(accumulators(4 * i), accumulators(4 * i + 1), accumulators(4 * i + 2),
                                             accumulators(4 * i + 3)));
        }
        __threadfence();
        __syncwarp();
        uint32_t arrived = 0;
        if (thread % 32 == 0) arrived = atomicAdd(params_.arrivals + part, 1u);
        if (__shfl_sync(0xffffffffu, arrived, 0) != static_cast<uint32_t>(params_.splits - 1)) return false;
        __threadfence();
        clear(accumulators);
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < kVectors; first += kLoads) {
#pragma unroll 1
            for (int split = 0; split < params_.splits; ++split) {
                CUTLASS_PRAGMA_UNROLL
                for (int i = first; i < first + kLoads; ++i) {
                    float4 const sum = __ldcg(sums + (split * kVectors + i) * 32 + thread % 32);
                    accumulators(4 * i) += sum.x;
                    accumulators(4 * i + 1) += sum.y;
                    accumulators(4 * i + 2) += sum.z;
                    accumulators(4 * i + 3) += sum.w;
                }
            }
        }
        return true;
    }

    Params const& params_;
};

template <class Output, class Config>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cutlass::float_e4m3_t, cutlass::layout::RowMajor, 16,
    cutlass::float_e4m3_t, cutlass::layout::ColumnMajor, 16, float, typename Config::Tile, typename Config::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue<Output, Config>::SharedStorage)>,
    Schedule>::CollectiveOp;

template <class Output, class Config>
using Gemm = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, Mainloop<Output, Config>,
    cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Epilogue<Output, Config>>,
    cutlass::gemm::PersistentScheduler>;

template <class Output, class Config>
struct Fp8Kernel : Gemm<Output, Config> {
    using Base = Gemm<Output, Config>;

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
TrtNvfp4Status launch(Fp8Gemm const& gemm, cudaStream_t stream) {
    using Kernel = Fp8Kernel<Output, Config>;
    using Value = cutlass::float_e4m3_t;
    if (gemm.m == 0) return TRT_NVFP4_SUCCESS;

    int64_t const k = gemm.k / gemm.splits;
    auto const stride = cute::make_stride(gemm.k, cute::_1{}, k);
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape =
        cute::make_shape(static_cast<int>(gemm.m), static_cast<int>(gemm.n), static_cast<int>(k), gemm.splits);
    arguments.mainloop = {reinterpret_cast<Value const*>(gemm.a.values), stride,
                          reinterpret_cast<Value const*>(gemm.w.values), stride};
    arguments.epilogue = gemm;
    // Tiles that share weights run together, so that weights are read from memory once.
    arguments.scheduler.raster_order = Kernel::TileScheduler::RasterOrderOptions::AlongM;
    TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&arguments.hw_info.device_id), "current device"));
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaDeviceGetAttribute(&arguments.hw_info.sm_count, cudaDevAttrMultiProcessorCount,
                                          arguments.hw_info.device_id),
                   "number of multiprocessors"));
    auto const params = Kernel::to_underlying_arguments(arguments, nullptr);

    auto* const kernel = cutlass::device_kernel<Kernel>;
    int const shared_bytes = static_cast<int>(Kernel::SharedStorageSize);
    TRT_NVFP4_RETURN_IF_ERROR(
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   "shared memory of the FP8 GEMM"));
    constexpr auto cluster = typename Kernel::ClusterShape{};
    cudaLaunchAttribute attributes[2]{};
    attributes[0] = programmatic_attribute();
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cute::size<0>(cluster), cute::size<1>(cluster), 1};
    cudaLaunchConfig_t config{};
    config.gridDim = Kernel::get_grid_shape(params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return check_cuda(cudaLaunchKernelEx(&config, kernel, params), "FP8 GEMM");
}

}  // namespace trt_nvfp4::sm90
