// A mixture of experts on SM90: the chosen experts' weights stream to the tensor cores once for every work item (some
// pairs of one expert, WorkItem), whose tokens are the columns, as in sm90_w4a16_mlp.cuh: as integers for one token,
// by wgmma where items are wide (choose_item_tokens), else by mma.sync. Earlier launches build the schedule and stage
// activations in global memory (sm90/moe/staging_launches.cuh); a later launch reduces the down projection's partial
// sums.
//
// What blocks exchange (exchange/); every buffer is written once a launch, so that nothing is overwritten:
//
//     buffer            writer                     readers              published by
//     plan.items, count       launch of the plan         dispatching threads  sentinels, which that launch resets first
//     up.x, factors     staging launch             up                   the end of that launch
//     ticket            dispatching threads        the same             the atomic; the plan's launch resets it
//     parts             up of shares (EvenShares)  up, the tile's end   sentinels, which the launches before reset
//     down.x            up                         down                 done[]; with shares sentinels; both reset
//     before outputs           down                       the launch behind    the end of this launch
//
// Two consumer warpgroups multiply. In the producer warpgroup one thread takes tasks, one copies their weights, a warp
// their activations, and a warp publishes hidden values to other blocks; it first stages those of narrow items.
#pragma once

#include <type_traits>

#include "formats/fixed_point.cuh"
#include "ptx/elect.cuh"
#include "w4a16/sm90/common/up.cuh"
#include "w4a16/sm90/moe/activations.cuh"

namespace trt_nvfp4::sm90 {

// A tile's hidden values are groups of K, two for a warpgroup without gates.
constexpr int kHiddenUnits = 2 * kWarpgroups * kGroup / 8;

// Those of narrow work items in flight to their image,
template <int kColumns>
struct HiddenStage {
    using Column = uint4[kHiddenUnits][8];  // [unit][token]

    Column columns[kColumns];
    uint64_t empty;

    __device__ __forceinline__ void init() { ptx::mbarrier_init(ptx::shared_address(&empty), 1); }
};
// and of wide ones, which are written where they belong.
struct NoHiddenStage {
    __device__ __forceinline__ void init() const {}
};

// kSharedEvenly: blocks share tiles (EvenShares), whose work items have one column. kOneToken: so that all work items
// have one. kTokensOfItem: the most pairs of a work item.
template <typename T, bool kSharedEvenly, bool kOneToken, int kTokensOfItem>
struct MixtureShared {
    static constexpr bool kEven = kSharedEvenly, kOne = kOneToken, kWide = kTokensOfItem > kItemTokens;
    static_assert(!kWide || (!kEven && !kOne));
    static constexpr int kColumns = kEven || kOne ? 1 : kTokensOfItem / 8;
    // Gate and up have loops of their own, down others.
    static constexpr bool kHasFactors = kWide && kXBecomesHalf<T>;
    // Columns are multiplied in steps of so many, each number of which is code of its own. More than four such loops
    // and ptxas has wgmma wait for each product, for want of registers.
    static constexpr int kStep = (kTokensOfItem > kWideItemTokens ? 2 : 1) * (kHasFactors ? 2 : 1);
    // Registers of a consumer thread. Where sums take most of them, what ends a task is read behind its products.
    static constexpr int kRegisters = kTokensOfItem > kWideItemTokens ? 224 : 200;
    static constexpr bool kReadsLate = kRegisters > 200;
    using StagedTile = std::conditional_t<kWide, ColumnStagedTile<kTokensOfItem>,
                                          std::conditional_t<kOne, TokenRowStagedTile, RowStagedTile<kBecomesHalf<T>>>>;

    // Factors of the tokens of tasks.
    struct Factors {
        __align__(16) float of_task[kQueue][kTokensOfItem];
    };
    struct NoFactors {};

    using Parts = PartSums<kOne>;

    TaskShared<StagedTile, !kWide, 1, 1> task;
    TaskQueue queue;
    std::conditional_t<kWide, NoHiddenStage, HiddenStage<kColumns>> hidden;
    uint64_t landed[kLandings];
    std::conditional_t<kHasFactors, Factors, NoFactors> factors;
};

// The shared expert's first weights to L2, while memory waits for the plan. By one thread; more of them would hold the
// plan up.
template <typename T>
__device__ __forceinline__ void prefetch_shared_expert(MixtureArgs<T> const& args) {
    constexpr int kWeightStagesOfBlock = 3;
    Projection<T> const& up = args.matrices[kUp][kShared];
    int const groups = (up.rows + kGroupRows - 1) / kGroupRows;
    int const end =
        args.shared_items == 0 ? 0 : min(groups * chunks_of(up.k), kWeightStagesOfBlock * static_cast<int>(gridDim.x));
#pragma unroll 1
    for (int i = blockIdx.x; i < end; i += gridDim.x) prefetch_stage(up.maps, 0, i % groups, i / groups);
}

// By one thread.
template <typename T, class Shared>
__device__ __forceinline__ void fetch_weights(MixtureArgs<T> const& args, Shared& shared) {
    constexpr int kWeightStagesUnderWay = 3;
    StageProducer producer(shared.task.weights);
    shared.queue.each([&](MixtureTask const& task, w4a16::RingPosition const&) {
        WeightMaps const& maps = args.matrices[task.phase][task.segment].maps;
        TileBoxes const tile(maps, task.expert, task.tile);
        bool const both = task.columns[1] > 0;
        int const begin = task.begin, end = task.end;
#pragma unroll 1
        for (int chunk = begin; chunk < end; ++chunk) {
            if (chunk == max(begin, end - kAhead)) ptx::mbarrier_arrive(ptx::shared_address(&shared.queue.ending));
            producer.fill(tile, 0, chunk, kWeightStagesUnderWay);
            if (both) {
                producer.fill(tile, 1, chunk, kWeightStagesUnderWay);
            } else {
                producer.pass(kWeightStagesUnderWay);
            }
        }
    });
}

// Zeros for values of a unit from `k` of its group on, a multiple of 16: behind an expert's last row lies the next
// one's first.
__device__ __forceinline__ void zero_from(int k, uint4& unit) {
    if (k <= 0) unit.x = 0u;
    if (k <= 16) unit.y = 0u;
    if (k <= 32) unit.z = 0u;
    if (k <= 48) unit.w = 0u;
}

// A task's hidden values to their image, by a warp.
template <bool kOne, typename T>
__device__ __forceinline__ void store_hidden(MixtureArgs<T> const& args, MixtureTask const& task,
                                             HiddenStage<1>::Column const* staged) {
    Projection<T> const& up = args.matrices[kUp][task.segment];
    RowImage<T> const image(args.matrices[kDown][task.segment].x, args.matrices[kDown][task.segment].k);
    int const units = kHiddenUnits / (up.gated ? 2 : 1);
    int const first = task.tile * units;
    int const width = args.matrices[kDown][task.segment].k;
    int const padded = up.padded_width / 8 - first;
    int const columns = item_columns(task.count);
    // Lanes of a token are neighbours.
    constexpr int kOfFactor = kRowFactorK / 8;
    static_assert(kOfFactor == 16);
    constexpr int kTokens = kOne ? 1 : 8;
    int const end = kOne ? 32 / kOfFactor : units / kOfFactor * kTokens;  // the same in all lanes, which shuffle
    int const unit = threadIdx.x % kOfFactor;
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
#pragma unroll 2
        for (int i = threadIdx.x % 32 / kOfFactor; i < end; i += 32 / kOfFactor) {
            int const own_unit = i / kTokens * kOfFactor + unit, token = i % kTokens;
            int const left = kOne && own_unit >= units ? 0 : width - (first + own_unit) / 8 * kGroup;
            uint4 eight[1] = {make_uint4(0u, 0u, 0u, 0u)};
            if (left > 0) eight[0] = staged[column][own_unit][token];
            zero_from(left, eight[0]);
            float factor = 1.0f;
            if constexpr (kOne) {
                factor = to_fixed_point<T, 1, 2, 4, 8>(eight);
            } else if constexpr (kBecomesHalf<T>) {
                factor = to_half<1, 2, 4, 8>(eight);
            }
            int const which = column * 8 + token;
            if (own_unit >= padded || which >= task.count || (kOne && own_unit >= units)) continue;
            w4a16::store_eight(image.unit(first + own_unit, task.first + which), eight[0]);
            if (unit == 0) image.set_factor((first + own_unit) / kOfFactor, task.first + which, factor);
        }
    }
}

// Counts a task of gate and up, which has stored its hidden values. A chunk lies in two tiles with gates, else in one;
// a last chunk with one of two tiles counts twice.
template <typename T>
__device__ __forceinline__ void count_tile(MixtureArgs<T> const& args, MixtureTask const& task) {
    Projection<T> const& up = args.matrices[kUp][task.segment];
    int const gated = up.gated ? 1 : 0;
    bool const alone = gated > (task.tile & 1) && task.tile + 1 == tiles_of(up.rows);
    count(args.done_of(task.segment, task.item) + (task.tile >> gated), alone ? 2 : 1);
}

// By a warp.
template <typename T, class Shared>
__device__ __forceinline__ void publish_tasks(MixtureArgs<T> const& args, Shared& shared) {
    TaskQueue& queue = shared.queue;
    queue.each([&](MixtureTask const& task, w4a16::RingPosition const& place) {
        ptx::mbarrier_wait(ptx::shared_address(&queue.stored[place.stage]), place.round);
        bool const is_part = Shared::kEven && task.is_part(args);
        if constexpr (!Shared::kWide) {
            if (task.phase == kUp && !is_part) store_hidden<Shared::kOne>(args, task, shared.hidden.columns);
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {
            if (task.phase == kUp && !is_part) {
                if constexpr (!Shared::kWide) ptx::mbarrier_arrive(ptx::shared_address(&shared.hidden.empty));
                if (!Shared::kEven) {  // there they are flags
                    __threadfence();
                    count_tile(args, task);
                }
            }
            ptx::mbarrier_arrive(ptx::shared_address(&queue.empty[place.stage]));
        }
        __syncwarp();
    });
}

// Outputs of four rows, one of each quarter, for a lane's two tokens of a column.
__device__ __forceinline__ void store_outputs(MixtureTask const& task, int rows, int column, float const (&values)[8]) {
    each_output(task.outputs, rows, task.count, task.tile, column,
                [&](float* place, int i) { __stcg(place, values[i]); });
}

// A wide work item's hidden values to their image, of one column from a lane's sums: all of it, whether it has as many
// tokens or not, and zeros where there are no rows.
template <typename T>
__device__ __forceinline__ void store_hidden_of_item(MixtureArgs<T> const& args, MixtureTask const& task,
                                                     UpEpilogue<T> const& epilogue, int column,
                                                     float const (&sums)[8]) {
    Projection<T> const& up = args.matrices[kUp][task.segment];
    Projection<T> const& down = args.matrices[kDown][task.segment];
    int const units = kHiddenUnits / (up.gated ? 2 : 1);
    uint8_t* const image = ItemImage(down, task.item, task.first, task.count).unit(task.tile * units, column);
    HiddenValues<1> hidden = epilogue.template finish<1>(up, sums);
    if ((task.tile + 1) * kTileRows > up.rows) hidden.zero_from(down.k - task.tile * units * 8);
    hidden.template each<ImageLayout<8>>(
        [&](uint32_t offset, float value) { *reinterpret_cast<T*>(image + offset) = ptx::from_float<T>(value); });
}

template <typename T, class Shared>
__device__ __forceinline__ void multiply_tasks(MixtureArgs<T> const& args, Shared& shared) {
    constexpr int kPairs = 8 * Shared::kColumns;
    Places at(shared.task);
    uint32_t turn = 0;
    // `phase`: the task's, or none where the same code serves both.
    auto const run = [&](MixtureTask const& task, w4a16::RingPosition const& place, auto phase) {
        constexpr int kPhase = decltype(phase)::value;
        using Product = std::conditional_t<kPhase == kUp, __half, T>;
        float acc[2][kPairs / 2];
        bool const up = kPhase == kNoPhase ? task.phase == kUp : kPhase == kUp;
        int const columns = task.columns[threadIdx.x / 128];
        Projection<T> const& matrix = args.matrices[task.phase][task.segment];
        UpEpilogue<T> of_up;
        RowEpilogue<T> of_down;
        auto const read_epilogue = [&] {
            if (up) {
                of_up.load(matrix, task.expert, task.tile);
            } else {
                of_down.load(matrix.tensor_scale + task.expert,
                             task.split > 0 ? nullptr : matrix.bias + static_cast<int64_t>(task.expert) * matrix.rows,
                             matrix.rows, task.tile);
            }
        };
        if constexpr (!Shared::kReadsLate) read_epilogue();
        auto const multiply = [&](auto steps) {
            constexpr int kColumns = Shared::kStep * decltype(steps)::value;
            constexpr int kTokens = Shared::kOne ? 1 : 8 * kColumns;
            if constexpr (kColumns <= Shared::kColumns) {
                multiply_task<Product, kTokens>(task.end - task.begin, args.one, at, acc);
            }
        };
        switch ((columns + Shared::kStep - 1) / Shared::kStep) {
            case 0:
                pass_over_task(task.end - task.begin, Shared::kWide ? 1 : item_columns(task.count), at);
                if constexpr (Shared::kWide) {  // its hidden values are zeros
                    for (auto& sums : acc) {
                        for (float& sum : sums) sum = 0.0f;
                    }
                }
                break;
            case 1:
                multiply(std::integral_constant<int, 1>{});
                break;
            case 2:
                multiply(std::integral_constant<int, 2>{});
                break;
            case 3:
                multiply(std::integral_constant<int, 3>{});
                break;
            default:
                multiply(std::integral_constant<int, 4>{});
        }
        if constexpr (Shared::kReadsLate) read_epilogue();
        bool const is_part = Shared::kEven && task.is_part(args);
        if constexpr (Shared::kEven) {
            if (columns > 0 && is_part) {
                Shared::Parts::store(args.parts, task.share, acc);
            } else if (columns > 0) {
                Shared::Parts::add(args.parts, task.first_share, task.share, acc);
                __syncwarp();
            }
        }
        if (up && !is_part) {
            if constexpr (Shared::kWide) {
#pragma unroll 1
                for (int column = 0; column < item_columns(task.count); ++column) {
                    float sums[8];
                    take_columns(acc, sums);
                    if constexpr (Shared::kHasFactors) {
                        float const* const own = shared.factors.of_task[place.stage] + column * 8 + threadIdx.x % 4 * 2;
#pragma unroll
                        for (int i = 0; i < 8; ++i) sums[i] *= own[i % 2];
                    }
                    store_hidden_of_item(args, task, of_up, column, sums);
                }
            } else {
                ptx::mbarrier_wait(ptx::shared_address(&shared.hidden.empty), turn ^ 1);
                turn ^= 1;
#pragma unroll 1
                for (int column = 0; column < columns; ++column) {
                    float sums[8];
                    take_columns(acc, sums);
                    // Places within the column.
                    auto* const staged = reinterpret_cast<uint8_t*>(shared.hidden.columns[column]);
                    of_up.template finish<1>(matrix, sums)
                        .template each<ImageLayout<8, Shared::kOne>>([&](uint32_t offset, float value) {
                            *reinterpret_cast<T*>(staged + offset) = ptx::from_float<T>(value);
                        });
                }
            }
        } else if (!up) {
#pragma unroll 1
            for (int column = 0; column < columns; ++column) {
                float sums[8];
                take_columns(acc, sums);
                of_down.apply(sums);
                store_outputs(task, matrix.rows, column, sums);
            }
        }
        ptx::mbarrier_arrive(ptx::shared_address(&shared.queue.stored[place.stage]));
    };
    shared.queue.each([&](MixtureTask const& task, w4a16::RingPosition const& place) {
        if constexpr (Shared::kHasFactors) {
            if (task.phase == kUp) {
                run(task, place, std::integral_constant<int, kUp>{});
            } else {
                run(task, place, std::integral_constant<int, kDown>{});
            }
        } else {
            run(task, place, std::integral_constant<int, kNoPhase>{});
        }
    });
}

template <typename T, bool kEven, bool kOne, int kTokensOfItem>
__global__ __launch_bounds__(kTaskThreads, 1) void sm90_w4a16_moe(__grid_constant__ MixtureArgs<T> const args) {
    using Shared = MixtureShared<T, kEven, kOne, kTokensOfItem>;
    extern __shared__ __align__(1024) uint8_t moe_bytes[];
    auto& shared = *reinterpret_cast<Shared*>(moe_bytes);
    // Uniform to the compiler too, which then keeps what all lanes share in uniform registers.
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        shared.task.init(1);
        shared.queue.init();
        shared.hidden.init();
        for (uint64_t& barrier : shared.landed) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
        ptx::mbarrier_init_fence();
    }
    // Rows of staged tiles that a work item does not have are multiplied too: to columns that are not kept.
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.task.staged_tiles) / 16); i += kTaskThreads) {
        reinterpret_cast<uint4*>(shared.task.staged_tiles)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    ptx::fence_async_proxy();
    __syncthreads();
    if (kEven && threadIdx.x == 32 * kWarps) prefetch_shared_expert(args);
    // Who takes tasks and who fetches their weights does not wait for the launches that make plan and images to end:
    // work items are flags (RouteArgs), and the previous call has ended.
    if (warp != kWarps && warp != kWarps + 2) ptx::await_previous_launch();
    if (warp < kWarps) {
        take_registers<Shared::kRegisters>();
        multiply_tasks(args, shared);
    } else {
        give_registers<Shared::kRegisters>();
        if (warp == kWarps) {
            if (ptx::elect()) {
                fetch_weights(args, shared);
                ptx::await_previous_launch();
                ptx::launch_next();
            }
        } else if (warp == kWarps + 1) {
            fetch_activations(args, shared);
        } else if (threadIdx.x == 32 * (kWarps + 2)) {
            dispatch<kEven, kOne>(args, shared.queue);
        } else if (warp == kWarps + 3) {
            publish_tasks(args, shared);
        }
    }
}

}  // namespace trt_nvfp4::sm90
