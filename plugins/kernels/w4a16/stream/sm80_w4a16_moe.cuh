// A mixture of experts at any number of tokens: the chosen experts' weights stream to the tensor cores once for every
// work item of 8 or 32 pairs, whose tokens are the columns. Three phases of one launch: gate and up; down; the weighted
// sums. Several small blocks per SM, so that one stages or finishes while others multiply; each takes an even,
// contiguous part of a phase's tasks, so that neighbours share their work item's activations. As in sm80_w4a16_mlp.cuh
// consumer warps stage and multiply while producer warps keep weights in flight (sm80_w4a16_ring.cuh).
//
// What blocks exchange, as sentinels (exchange/sentinels.cuh) that the plan's launch resets; every buffer is written
// once a launch, so that nothing is overwritten:
//
//     buffer       writer  readers
//     hidden       up      down
//     outputs      down    sums
//     y            sums    the caller
#pragma once

#include "w4a16/stream/sm80_w4a16_mlp.cuh"
#include "w4a16/stream/sm80_w4a16_moe_stream.cuh"

namespace trt_nvfp4::w4a16 {

// A chunk of activations of `places` tokens in a staged tile: first the values, of which eight tokens share a column,
// then, where the product has them, factors.
__host__ __device__ constexpr int item_factors(int places) { return kChunk * 2 * places; }

template <typename T, int kMostColumns>
__host__ __device__ constexpr int item_staged_tile_bytes(int places) {
    constexpr int kAligned = 16;
    int const factors = Product<T, kMostColumns>::kHasFactors ? (4 * places < kAligned ? kAligned : 4 * places) : 0;
    return item_factors(places) + factors;
}

// A work item's tokens in a staged tile: of up to eight just as many as a power of two has, so that few tokens take few
// bytes.
__host__ __device__ constexpr int item_places(int count) {
    return count <= 1 ? 1 : count <= 2 ? 2 : count <= 4 ? 4 : count <= 8 ? 8 : count <= 16 ? 16 : 32;
}

// As multiply_chunk, with a staged tile of `places` tokens: columns beyond them repeat others, and are not kept.
template <typename T, int kColumns, int kMostColumns>
__device__ __forceinline__ void multiply_places(uint8_t const* stage, uint8_t const* staged_tile, int places,
                                                uint32_t one, Accumulators<kMostColumns>& acc) {
    int const lane = threadIdx.x % 32;
    int const pitch = kColumns > 1 ? 32 : places * 4;
    int const place = kColumns > 1 ? lane : (lane / 4 & (places - 1)) * 4 + lane % 4;
    multiply_values<T, kColumns, 1>(stage, staged_tile, lane, pitch, place, one, acc);
}

// The same for T, of a staged tile as stage_item leaves it.
template <typename T, int kColumns, int kMostColumns>
__device__ __forceinline__ void multiply_item_chunk(uint8_t const* stage, uint8_t const* staged_tile, int places,
                                                    uint32_t one, Accumulators<kMostColumns>& acc) {
    if constexpr (!Product<T, kMostColumns>::kHasFactors) {
        multiply_places<T, kColumns>(stage, staged_tile, places, one, acc);
    } else {
        static_assert(kMostColumns == 1, "factors of one column");
        Accumulators<1> of_chunk = {};
        multiply_places<typename Product<T, 1>::Operand, 1>(stage, staged_tile, places, one, of_chunk);
        auto const* const factors = reinterpret_cast<float const*>(staged_tile + item_factors(places));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float const factor = factors[(threadIdx.x % 4 * 2 + i) & (places - 1)];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& sum = acc[j / 2][0][j % 2 * 2 + i];
                sum = fmaf(of_chunk[j / 2][0][j % 2 * 2 + i], factor, sum);
            }
        }
    }
}

// Activations of chunks [begin, end) of a work item to the staged tile, as multiply_item_chunk reads them. What lies in
// the places of columns that the work item does not have stays: it reaches no column that is kept. By all warps that
// multiply.
template <typename T, int kMostColumns>
__device__ __forceinline__ void stage_item(MoeArgs<T> const& args, int phase, int segment, WorkItem const& item,
                                           int begin, int end, int places, uint8_t* staged_tile) {
    using P = Product<T, kMostColumns>;
    constexpr int kBatch = kMostColumns == 1 ? 5 : 8;  // as registers allow
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const t = lane / 2 % 4;
    int const word = lane / 8 * 2 + lane % 2;
    bool const gathers = phase == kUpPhase && segment == kRouted;
    bool const scaled = gathers && args.scale_input;
    // Lane i finds the row of column i.
    int row = item.first + min(lane, item.count - 1);
    float factor = 1.0f;
    if (gathers) {
        int const pair = args.plan.order[row];
        row = pair / args.top_k;
        if (scaled) factor = args.plan.weights[pair];
    }
    T const* const all = phase == kUpPhase ? args.x : args.hidden[segment];
    int const k = args.weights[phase][segment].k;
    int const shift = __ffs(places) - 1;
    int const pitch = min(32, places * 4);
    int const units = (end - begin) * item.count;
    int const chunk_step = args.warps / item.count;
    int const column_step = args.warps % item.count;
    int chunk = warp / item.count;
    int column = warp % item.count;
#pragma unroll 1
    for (int first = 0; first < units; first += args.warps * kBatch) {
        uint4 eights[kBatch];
        T const* from[kBatch];
        int at[kBatch];  // chunk and column, or -1
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            bool const wanted = first + warp + i * args.warps < units;
            int const offset = (begin + chunk) * kChunk + t * 64 + word * 8;
            from[i] = all + static_cast<int64_t>(__shfl_sync(0xffffffffu, row, column)) * k + offset;
            at[i] = wanted ? chunk << shift | column : -1;
            eights[i] = make_uint4(0u, 0u, 0u, 0u);
            if (wanted && offset < k) eights[i] = load_eight(from[i]);
            chunk += chunk_step;
            column += column_step;
            if (column >= item.count) {
                column -= item.count;
                ++chunk;
            }
        }
        for (bool sentinel = phase == kDownPhase; sentinel;) {
            sentinel = false;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (!has_sentinel(eights[i])) continue;
                eights[i] = load_eight(from[i]);
                sentinel = true;
            }
        }
        if (first == 0) sync_warps<kMoeWarps<kMostColumns>>();  // nobody reads what is overwritten now
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (at[i] < 0) break;
            int const of_column = at[i] & (places - 1);
            if (scaled) {
                float const of_pair = __shfl_sync(0xffffffffu, factor, of_column);
                T* const values = reinterpret_cast<T*>(&eights[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) values[j] = ptx::from_float<T>(ptx::to_float(values[j]) * of_pair);
            }
            uint8_t* const chunk_staged_tile =
                staged_tile + (at[i] >> shift) * item_staged_tile_bytes<T, kMostColumns>(places);
            if constexpr (P::kHasFactors) {
                float of_chunk;
                eights[i] = to_half<T>(eights[i], of_chunk);
                reinterpret_cast<float*>(chunk_staged_tile + item_factors(places))[of_column] = of_chunk;
            }
            int const slot = (word * max(1, places / 8) + of_column / 8) * pitch + of_column % 8 * 4 + t;
            *reinterpret_cast<uint4*>(chunk_staged_tile + slot * 16) = pair_activations<typename P::Operand>(eights[i]);
        }
    }
    sync_warps<kMoeWarps<kMostColumns>>();
}

// Eight rows' values through the activation, where gated two each, in T. Not inlined, which saves registers.
template <typename T>
__device__ __noinline__ uint4 activate_rows(float4 low, float4 high, TrtNvfp4Activation activation, bool gated,
                                            float alpha, float limit) {
    float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (gated) {
        gate_values(activation, alpha, limit, values);
    } else {
        activate_values(activation, values);
    }
    uint4 rounded;
    T* const eight = reinterpret_cast<T*>(&rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = ptx::from_float<T>(values[i]);
    return rounded;
}

// Eight rows of a tile for one token: scale and bias, then the activation in T, or the plain float32 output.
template <typename T, int kMostColumns>
__device__ __forceinline__ void finish_rows(MoeArgs<T> const& args, int phase, int segment, int split, int row, int at,
                                            uint4 bias_eight, float tensor_scale, float const* turned) {
    ExpertWeights const& w = args.weights[phase][segment];
    float values[8] = {};
#pragma unroll 1
    for (int group = 0; group < args.split[phase].k_groups; ++group) {
        float const* const part = turned + group * static_cast<int>(sizeof(Turned) / 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] += part[i];
    }
    T const* const bias = reinterpret_cast<T const*>(&bias_eight);
    using Operand = typename Product<T, kMostColumns>::Operand;
    float const scale = tensor_scale * static_cast<float>(1 << Decoder<Operand>::kScaleShift);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fmaf(values[i], scale, ptx::to_float(bias[i]));
    if (phase == kDownPhase) {
        int64_t const rows = segment == kRouted ? int64_t{args.m} * args.top_k : args.m;
        float* const out = args.outputs[segment] + (split * rows + at) * w.rows + row;
        auto const bits = [&](int i) { return __float_as_uint(values[i]); };
        store_eight(out, make_uint4(bits(0), bits(1), bits(2), bits(3)));
        store_eight(out + 4, make_uint4(bits(4), bits(5), bits(6), bits(7)));
        return;
    }
    float4 const low = make_float4(values[0], values[1], values[2], values[3]);
    float4 const high = make_float4(values[4], values[5], values[6], values[7]);
    uint4 const eight = activate_rows<T>(low, high, args.activation, args.gated, args.alpha, args.limit);
    int const width = args.gated ? w.rows / 2 : w.rows;
    T* const out = args.hidden[segment] + static_cast<int64_t>(at) * width + (args.gated ? row / 2 : row);
    store_four(out, {eight.x, eight.y});
    if (!args.gated) store_four(out + 4, {eight.z, eight.w});
}

// One task with up to 8 * kMostColumns pairs. Its parts are in the program once, the loops over chunks excepted.
// same_activations: the task before had the same.
template <typename T, int kMostColumns>
__device__ __forceinline__ void run_task(MoeArgs<T> const& args, ExpertTask const& task, WorkItem const& item,
                                         int phase, int part, bool same_activations,
                                         Rings<kMoeWarps<kMostColumns>> const& rings, RingPosition& position,
                                         uint8_t* staged_tile, Turned* turned) {
    ExpertWeights const& w = args.weights[phase][task.segment];
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const k_groups = args.split[phase].k_groups;
    bool const has_rows = task.tile < w.tiles();
    int const row = task.tile / kTilesPerGroup * 128 + lane % 4 * 32 + task.tile % kTilesPerGroup * 8;

    // Read long before it is needed.
    uint4 bias = make_uint4(0u, 0u, 0u, 0u);
    if (row < w.rows && task.split == 0) {
        bias = *reinterpret_cast<uint4 const*>(static_cast<T const*>(w.bias) +
                                               static_cast<int64_t>(item.expert) * w.rows + row);
    }
    float const tensor_scale = w.tensor_scale[item.expert];

    int const places = item_places(item.count);
    int const capacity = args.memory.staged_tile_bytes / item_staged_tile_bytes<T, kMostColumns>(places);
    int const chunks = task.end - task.begin;
    int const staged_tiles = chunks <= capacity ? 1 : (chunks + capacity - 1) / capacity;
    int const staged_tile_chunks = staged_tiles == 1 ? chunks : (chunks + staged_tiles - 1) / staged_tiles;
    Accumulators<kMostColumns> acc = {};
#pragma unroll 1
    for (int begin = task.begin; begin < task.end; begin += staged_tile_chunks) {
        int const end = min(begin + staged_tile_chunks, task.end);
        if (!same_activations || staged_tiles > 1) {
            stage_item<T, kMostColumns>(args, phase, task.segment, item, begin, end, places, staged_tile);
        }
        int const first = begin + ((task.k_group - (begin - task.begin)) & (k_groups - 1));
        auto const multiply = [&](auto columns) {
            if constexpr (decltype(columns)::value <= kMostColumns) {
#pragma unroll 1
                for (int chunk = first; chunk < end; chunk += k_groups) {
                    uint8_t const* const stage = rings.acquire(warp, position);
                    if (has_rows) {
                        multiply_item_chunk<T, decltype(columns)::value>(
                            stage, staged_tile + (chunk - begin) * item_staged_tile_bytes<T, kMostColumns>(places),
                            places, args.one, acc);
                    }
                    rings.release(warp, position);
                }
            }
        };
        if (places <= 8) {
            multiply(std::integral_constant<int, 1>{});
        } else if (places == 16) {
            multiply(std::integral_constant<int, 2>{});
        } else {
            multiply(std::integral_constant<int, 4>{});
        }
    }
    if (task.last_stage_is_empty(k_groups)) {
        rings.acquire(warp, position);
        rings.release(warp, position);
    }

#pragma unroll 1
    for (int column = 0; column * 8 < item.count; ++column) {
        if (k_groups > 1) sync_warps<kMoeWarps<kMostColumns>>();
        __syncwarp();
        turn(acc[0][0], acc[1][0], turned[warp]);
        __syncwarp();
        if (k_groups > 1) sync_warps<kMoeWarps<kMostColumns>>();
#pragma unroll
        for (int next = 1; next < kMostColumns; ++next) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc[0][next - 1][i] = acc[0][next][i];
                acc[1][next - 1][i] = acc[1][next][i];
            }
        }
        int const token = column * 8 + lane / 4;
        // In turn, so that no warp is always behind.
        if (!has_rows || ((column + part) & (k_groups - 1)) != task.k_group || token >= item.count || row >= w.rows) {
            continue;
        }
        finish_rows<T, kMostColumns>(args, phase, task.segment, task.split, row, item.first + token, bias, tensor_scale,
                                     &turned[warp - task.k_group][lane / 4][lane % 4 * 8]);
    }
}

// Four neighbouring outputs, once they are there: no arithmetic yields the NaN of the sentinel.
__device__ __forceinline__ bool is_sentinel(uint4 four) {
    return (four.x == ~0u) | (four.y == ~0u) | (four.z == ~0u) | (four.w == ~0u);
}

// y, four values a lane.
template <typename T>
__device__ void sum_outputs(MoeArgs<T> const& args) {
    int const width = args.weights[kDownPhase][kRouted].rows;
    int const slices = (width + 127) / 128;
    MoeTerms const terms{args.plan,
                         args.outputs[kRouted],
                         args.shared_items > 0 ? args.outputs[kShared] : nullptr,
                         args.split[kDownPhase].splits,
                         args.m,
                         args.top_k,
                         width,
                         args.scale_input};
    int const ranks = terms.ranks();
    int const lane = threadIdx.x % 32;
    for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < args.m * slices; unit += args.warps * gridDim.x) {
        int const token = unit / slices;
        int const column = unit % slices * 128 + lane * 4;
        if (column >= width) continue;
        float sums[4] = {};
#pragma unroll 1
        for (MoeTerm next{}; next.rank < ranks;) {
            constexpr int kBatch = 8;
            float const* from[kBatch];
            float factors[kBatch];
            uint4 fours[kBatch];
            bool has[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                has[i] = next.rank < ranks;
                from[i] = terms.row(token, next, factors[i]) + column;
                fours[i] = load_eight(from[i]);
                next = terms.later(next, 1);
            }
            for (bool sentinel = true; sentinel;) {
                sentinel = false;
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (!is_sentinel(fours[i])) continue;
                    fours[i] = load_eight(from[i]);
                    sentinel = true;
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (!has[i]) continue;
                sums[0] = fmaf(factors[i], __uint_as_float(fours[i].x), sums[0]);
                sums[1] = fmaf(factors[i], __uint_as_float(fours[i].y), sums[1]);
                sums[2] = fmaf(factors[i], __uint_as_float(fours[i].z), sums[2]);
                sums[3] = fmaf(factors[i], __uint_as_float(fours[i].w), sums[3]);
            }
        }
        __align__(8) T rounded[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rounded[i] = ptx::from_float<T>(sums[i]);
        *reinterpret_cast<uint2*>(args.y + static_cast<int64_t>(token) * width + column) =
            *reinterpret_cast<uint2 const*>(rounded);
    }
}

template <typename T, int kMostColumns>
__device__ __forceinline__ void multiply_experts(MoeArgs<T> const& args, TaskRanges const& ranges,
                                                 Rings<kMoeWarps<kMostColumns>> const& rings, uint8_t* staged_tile,
                                                 Turned* turned) {
    // No column may be uninitialised. While the first weights are in flight.
#pragma unroll 1
    for (int i = threadIdx.x; i < args.memory.staged_tile_bytes / 16; i += 32 * kMoeWarps<kMostColumns>) {
        reinterpret_cast<uint4*>(staged_tile)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    RingPosition position;
#pragma unroll 1
    for (int phase = args.first_phase; phase < min(args.last_phase, static_cast<int>(kSumPhase)); ++phase) {
        // A single token is every expert's.
        bool const same_for_all = phase == kUpPhase && args.m == 1 && !args.scale_input;
#pragma unroll 1
        for (TaskPlace place = ranges.begin[phase]; place.is_before(ranges.end[phase]);) {
            ExpertTask const task(args, phase, ranges.routed_items, place, threadIdx.x / 32);
            bool const same_activations = ranges.begin[phase].is_before(place) && args.split[phase].splits == 1 &&
                                          (place.part > 0 || same_for_all);
            run_task<T, kMostColumns>(args, task, item_of(args, task), phase, place.part, same_activations, rings,
                                      position, staged_tile, turned);
            place = place.next(args.weights[phase][task.segment].tasks_per_item);
        }
    }
    if (args.last_phase > kSumPhase) sum_outputs(args);
}

// Work items have at most 8 * kMostColumns pairs.
template <typename T, int kMostColumns>
__global__ __launch_bounds__(kMoeThreads<kMostColumns>,
                             kMoeBlocks<kMostColumns>) void sm80_w4a16_moe(__grid_constant__ MoeArgs<T> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    constexpr int kMultipliers = kMoeWarps<kMostColumns>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t ring_barriers[Rings<kMultipliers>::kBarriers];
    __shared__ __align__(16) Turned turned[kMultipliers];
    __shared__ TaskRanges ranges;
    int const warp = threadIdx.x / 32;
    Rings<kMultipliers> const rings(shared, ring_barriers, args.memory.stages);
    if (threadIdx.x % 32 == 0 && warp < kMultipliers) rings.init(warp);
    // All warps: the plan comes from the kernel before.
    wait_for_kernels_before();
    let_next_kernel_start();
    if (warp == 0) {
        TaskRanges const found(args);
        if (threadIdx.x == 0) ranges = found;
    }
    __syncthreads();
    if (warp >= kMultipliers) {
        produce_experts<kMostColumns>(args, ranges, warp - kMultipliers, rings);
        return;
    }
    multiply_experts<T, kMostColumns>(args, ranges, rings, shared + kMultipliers * args.memory.stages * kStageBytes,
                                      turned);
}

}  // namespace trt_nvfp4::w4a16
