// Routing on the GPU. A warp chooses a token's experts: their keys lie in its registers, and each round takes the
// largest by two reductions over the warp. One block sorts the pairs (moe_items.cuh).
#pragma once

#include "common/activation.cuh"
#include "common/divisor.h"
#include "common/programmatic_launch.cuh"
#include "moe/work_items.cuh"
#include "ptx/element.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

constexpr int kRouteThreads = 256;
// The block that sorts routes as well where it has a warp for each token, and these so many registers for keys.
constexpr int kPlanSlots = 16;
template <int kSlots>
constexpr int kPlanBlock = kSlots <= 8 ? kPlanThreads : kPlanThreads / 2;  // its most threads
constexpr int kPlanTokens = kPlanThreads / 32;

namespace routing {

constexpr float kLargest = 3.402823466e38f;

// NaN counts as the smallest float32, infinities as the largest and the smallest.
__device__ __forceinline__ float finite(float x) { return isnan(x) ? -kLargest : fminf(fmaxf(x, -kLargest), kLargest); }

// Unsigned integers in the order of the floats, zeros of both signs being one; 0 is below all of them.
__device__ __forceinline__ uint32_t ordered(float x) {
    uint32_t const bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(uint32_t key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// a / d for d from 2^-67 to 2^126, but for the last bit now and then: a division branches, and a lane's experts would
// take it one after another.
__device__ __forceinline__ float ratio(float a, float d) {
    float const inverse = __fdividef(1.0f, d);
    float const quotient = a * inverse;
    return fmaf(fmaf(-d, quotient, a), inverse, quotient);
}

// Zero where it would be hardly above the least normal float32, or below.
__device__ __forceinline__ float sigmoid_score(float x) { return x > -87.0f ? ratio(1.0f, 1.0f + expf(-x)) : 0.0f; }

// exp of what is never positive: it does not overflow.
__device__ __forceinline__ float sqrt_softplus_score(float x) {
    return sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

__device__ __forceinline__ float warp_largest(float x) { return unordered(ptx::warp_max(ordered(x))); }

// What turns a token's logits into scores, once the softmax's sums are known.
struct Score {
    TrtNvfp4Scoring scoring;
    float largest, total;  // of a softmax

    __device__ __forceinline__ float operator()(float logit) const {
        if (scoring == TRT_NVFP4_SOFTMAX) return ratio(expf(logit - largest), total);
        if (scoring == TRT_NVFP4_SQRT_SOFTPLUS) return sqrt_softplus_score(logit);
        return scoring == TRT_NVFP4_SIGMOID ? sigmoid_score(logit) : logit;
    }
};

// The keys of a token's experts: expert e is slot e / 32 of lane e % 32. Taken experts, closed ones and those beyond
// the last have key 0.
template <int kSlots>
struct Keys {
    uint32_t slots[kSlots];

    // The expert of the largest key, the lowest one of equals; it is taken out. Every lane gets it.
    __device__ __forceinline__ int pop() {
        uint32_t largest[kSlots];
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) largest[slot] = slots[slot];
        // In pairs, not one after another: who pops waits for all of it.
#pragma unroll
        for (int step = 1; step < kSlots; step *= 2) {
#pragma unroll
            for (int slot = 0; slot < kSlots; slot += 2 * step) {
                largest[slot] = max(largest[slot], largest[slot + step]);
            }
        }
        uint32_t own = 0;
#pragma unroll
        for (int slot = kSlots - 1; slot >= 0; --slot) {
            if (slots[slot] == largest[0]) own = slot * 32 + threadIdx.x % 32;
        }
        bool const is_most = largest[0] == ptx::warp_max(largest[0]);
        uint32_t const expert = __reduce_min_sync(0xffffffffu, is_most ? own : ~0u);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            slots[slot] = slot * 32 + threadIdx.x % 32 == expert ? 0 : slots[slot];
        }
        return static_cast<int>(expert);
    }
};

// Words of shared memory with which a warp closes groups.
__device__ __forceinline__ int group_words(RouteArgs const& args) { return args.experts + args.groups; }

// Experts outside the best groups get the key 0. Groups have 32 experts, each in one slot.
template <int kSlots>
__device__ __forceinline__ void close_slots(RouteArgs const& args, Keys<kSlots>& keys) {
    int const lane = threadIdx.x % 32;
    uint32_t left[kSlots];
    float scores[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        left[slot] = keys.slots[slot];
        scores[slot] = 0.0f;
    }
#pragma unroll 1
    for (int rank = 0; rank < args.group_score_top; ++rank) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            uint32_t const most = ptx::warp_max(left[slot]);
            scores[slot] += unordered(most);
            // One of several equals is taken out.
            uint32_t const equals = __ballot_sync(0xffffffffu, left[slot] == most);
            if (lane == __ffs(static_cast<int>(equals)) - 1) left[slot] = 0;
        }
    }
    float own = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) own = slot == lane ? scores[slot] : own;
    int better = 0;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        bool const counts = scores[slot] > own || (scores[slot] == own && slot < lane);
        better += slot < args.groups && counts;
    }
    uint32_t const closed = __ballot_sync(0xffffffffu, better >= args.open_groups);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        if ((closed >> slot & 1) != 0) keys.slots[slot] = 0;
    }
}

// The same of groups of any size.
template <int kSlots>
__device__ __forceinline__ void close_groups(RouteArgs const& args, Keys<kSlots>& keys, uint32_t* memory) {
    int const lane = threadIdx.x % 32;
    int const size = args.experts / args.groups;
    uint32_t* const left = memory;  // keys that have not been added up, by group
    float* const scores = reinterpret_cast<float*>(memory + args.experts);
    __syncwarp();
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        if (slot * 32 + lane < args.experts) left[slot * 32 + lane] = keys.slots[slot];
    }
    __syncwarp();

    // As many lanes a group as let the warp look through all of them at once.
    int width = 1;
    while (2 * width * args.groups <= 32) width *= 2;
    uint32_t const neighbours = ((1u << width) - 1) << lane / width * width;
#pragma unroll 1
    for (int first = 0; first < args.groups; first += 32 / width) {
        int const group = first + lane / width;
        int const members = group < args.groups ? size : 0;
        float sum = 0.0f;
#pragma unroll 1
        for (int rank = 0; rank < args.group_score_top; ++rank) {
            uint32_t best = 0;
            int place = 0;
#pragma unroll 4
            for (int i = lane % width; i < members; i += width) {
                uint32_t const key = left[group * size + i];
                if (key > best) place = i;
                best = max(best, key);
            }
            uint32_t most = best;
            for (int offset = width / 2; offset > 0; offset /= 2) {
                most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
            }
            sum += unordered(most);
            // One of several equals is taken out.
            uint32_t const equals = __ballot_sync(0xffffffffu, best == most) & neighbours;
            if (members > 0 && lane == __ffs(static_cast<int>(equals)) - 1) left[group * size + place] = 0;
        }
        if (members > 0 && lane % width == 0) scores[group] = sum;
    }
    __syncwarp();
    Divisor const per_group(size);
#pragma unroll 1
    for (int first = 0; first < args.groups; first += 32) {
        int const group = first + lane;
        int better = 0;
        if (group < args.groups) {
            float const score = scores[group];
#pragma unroll 4
            for (int other = 0; other < args.groups; ++other) {
                better += scores[other] > score || (scores[other] == score && other < group);
            }
        }
        uint32_t const closed = __ballot_sync(0xffffffffu, better >= args.open_groups);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            uint32_t const own = per_group.of(slot * 32 + lane) - first;
            if (own < 32 && (closed >> own & 1) != 0) keys.slots[slot] = 0;
        }
    }
}

// One token by one warp; `memory` holds group_words. The experts also go to `chosen`, unless it is null.
template <int kSlots>
__device__ void route(RouteArgs const& args, int token, uint32_t* memory, uint16_t* chosen) {
    int const lane = threadIdx.x % 32;
    float const* const logits = args.logits + static_cast<int64_t>(token) * args.experts;
    // No branches, so that all are in flight at once: the corrections too, as far as there are registers.
    constexpr bool kCorrectionsAtOnce = kSlots <= 8;
    float row[kSlots], corrections[kCorrectionsAtOnce ? kSlots : 1];
    auto const expert_of = [&](int slot) { return min(slot * 32 + lane, args.experts - 1); };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        row[slot] = logits[expert_of(slot)];
        if constexpr (kCorrectionsAtOnce) corrections[slot] = args.correction_bias[expert_of(slot)];
    }
    auto const correction = [&](int slot) {
        if constexpr (kCorrectionsAtOnce) return corrections[slot];
        return args.correction_bias[expert_of(slot)];
    };
    float largest = -kLargest;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        row[slot] = slot * 32 + lane < args.experts ? finite(row[slot]) : -INFINITY;
        largest = fmaxf(largest, row[slot]);
    }
    Score score{args.scoring, 0.0f, 1.0f};
    if (args.scoring == TRT_NVFP4_SOFTMAX) {
        score.largest = warp_largest(largest);
        float total = 0.0f;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            row[slot] = expf(row[slot] - score.largest);
            total += row[slot];
        }
        score.total = ptx::warp_sum(total);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) row[slot] = ratio(row[slot], score.total);
    } else if (args.scoring == TRT_NVFP4_SIGMOID) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) row[slot] = sigmoid_score(row[slot]);
    } else if (args.scoring == TRT_NVFP4_SQRT_SOFTPLUS) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) row[slot] = sqrt_softplus_score(row[slot]);
    }
    Keys<kSlots> keys;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        int const expert = slot * 32 + lane;
        keys.slots[slot] = expert < args.experts ? ordered(finite(row[slot] + correction(slot))) : 0;
    }
    if (kSlots <= 8 && args.groups > 1 && args.groups * 32 == args.experts) {
        close_slots(args, keys);
    } else if (args.groups > 1) {
        close_groups(args, keys, memory);
    }

    // Lane r % 32 keeps rank r.
    constexpr int kPerLane = TRT_NVFP4_MAX_TOP_K / 32;
    static_assert(kPerLane == 2, "ranks of a lane");
    int expert[kPerLane] = {};
#pragma unroll 1
    for (int rank = 0; rank < args.top_k; ++rank) {
        int const popped = keys.pop();
        if (lane == rank % 32) (rank < 32 ? expert[0] : expert[1]) = popped;
    }
    auto const each_own = [&](auto&& f) {
        if (lane < args.top_k) f(0);
        if (lane + 32 < args.top_k) f(1);
    };
    // Before the weights, which the next kernel does not wait for.
    if (chosen != nullptr && args.tokens == 1) place_one_token(args, expert);
    float weight[kPerLane];
    float total = 0.0f;
    each_own([&](int i) { weight[i] = score(finite(logits[expert[i]])); });
    if (args.scoring == TRT_NVFP4_SOFTMAX_OF_CHOSEN) {
        largest = -INFINITY;
        each_own([&](int i) { largest = fmaxf(largest, weight[i]); });
        largest = warp_largest(largest);
        each_own([&](int i) {
            weight[i] = expf(weight[i] - largest);
            total += weight[i];
        });
        total = ptx::warp_sum(total);
        each_own([&](int i) { weight[i] = ratio(weight[i], total); });
    } else if (args.scoring == TRT_NVFP4_SIGMOID_OF_CHOSEN) {
        each_own([&](int i) { weight[i] = sigmoid_score(weight[i]); });
    } else if (args.scoring == TRT_NVFP4_GIVEN) {
        each_own([&](int i) { weight[i] = weight[i] > -kLargest ? weight[i] : 0.0f; });
    }
    if (args.renormalize) {
        total = 0.0f;
        each_own([&](int i) { total += weight[i]; });
        total = ptx::warp_sum(total) + 1e-20f;
        bool const any_sum = args.scoring == TRT_NVFP4_GIVEN;  // beyond what ratio() divides by
        each_own([&](int i) { weight[i] = any_sum ? weight[i] / total : ratio(weight[i], total); });
    }
    each_own([&](int i) {
        int const pair = token * args.top_k + lane + 32 * i;
        args.plan.experts[pair] = expert[i];
        args.plan.weights[pair] = weight[i] * args.scaling_factor;
        if (chosen != nullptr) chosen[pair] = static_cast<uint16_t>(expert[i]);
    });
    if (lane == 0 && args.shared_gate == nullptr) args.plan.shared_factor[token] = 1.0f;
}

// Tokens first, first + step, ... by the block's warps.
template <int kSlots>
__device__ __forceinline__ void route_tokens(RouteArgs const& args, int first, int step, uint32_t* memory,
                                             uint16_t* chosen) {
    int const fit = args.groups > 1 ? kWords / group_words(args) : kPlanThreads / 32;
    int const warps = min(static_cast<int>(blockDim.x) / 32, fit);
    int const warp = threadIdx.x / 32;
    if (warp >= warps) return;
    for (int token = first * warps + warp; token < args.tokens; token += step * warps) {
        route<kSlots>(args, token, memory + (args.groups > 1 ? warp * group_words(args) : 0), chosen);
    }
}

// Constants of the model: kernels before need not have ended.
__device__ __forceinline__ void prefetch_corrections(RouteArgs const& args) {
    constexpr int kLine = 128 / sizeof(float);
    int const i = threadIdx.x * kLine;
    if (i < args.experts) ptx::prefetch(args.correction_bias + i);
}

// By one warp.
template <typename T>
__device__ __forceinline__ float dot(T const* a, T const* b, int count) {
    constexpr int kVector = 16 / sizeof(T);
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x % 32 * kVector; i < count; i += 32 * kVector) {
        uint4 const left = *reinterpret_cast<uint4 const*>(a + i);
        uint4 const right = *reinterpret_cast<uint4 const*>(b + i);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            sum = fmaf(ptx::to_float(reinterpret_cast<T const*>(&left)[j]),
                       ptx::to_float(reinterpret_cast<T const*>(&right)[j]), sum);
        }
    }
    return ptx::warp_sum(sum);
}

template <typename T>
__device__ __forceinline__ void gate_shared(RouteArgs const& args, int first, int step) {
    for (int token = first; token < args.tokens; token += step) {
        T const* const x = static_cast<T const*>(args.x) + static_cast<int64_t>(token) * args.hidden;
        float const factor = sigmoid(dot(x, static_cast<T const*>(args.shared_gate), args.hidden));
        if (threadIdx.x % 32 == 0) args.plan.shared_factor[token] = factor;
    }
}

}  // namespace routing

template <int kSlots>
__global__ __launch_bounds__(kRouteThreads, 1) void moe_route(__grid_constant__ RouteArgs const args) {
    __shared__ uint32_t memory[routing::kWords];
    let_next_kernel_start();
    routing::prefetch_corrections(args);
    wait_for_kernels_before();
    routing::route_tokens<kSlots>(args, blockIdx.x, gridDim.x, memory, nullptr);
}

// A helper of moe_plan, `dtype` being that of x and shared_gate.
struct GateAndErase {
    TrtNvfp4DataType dtype;

    __device__ __forceinline__ void operator()(RouteArgs const& args, int first, int step) const {
        if (args.shared_gate != nullptr) {
            switch (dtype) {
                case TRT_NVFP4_FLOAT32:
                    routing::gate_shared<float>(args, first / 32, step / 32);
                    break;
                case TRT_NVFP4_FLOAT16:
                    routing::gate_shared<__half>(args, first / 32, step / 32);
                    break;
                case TRT_NVFP4_BFLOAT16:
                    routing::gate_shared<__nv_bfloat16>(args, first / 32, step / 32);
            }
        }
        uint4 const sentinel = make_uint4(~0u, ~0u, ~0u, ~0u);
#pragma unroll 1
        for (int64_t i = first; i < args.sentinel_bytes / 16; i += step)
            static_cast<uint4*>(args.sentinel)[i] = sentinel;
    }
};

// Block 0 sorts, and with slots it routes first: a launch less where tokens are few. The threads of the others help, by
// helper(args, thread, threads): with what needs no plan and with the shared expert's gates.
template <int kSlots, class Helper>
__global__ __launch_bounds__(kPlanBlock<kSlots>, 1) void moe_plan(__grid_constant__ RouteArgs const args,
                                                                  __grid_constant__ Helper const helper) {
    if (kSlots > 0 && blockIdx.x == 0) routing::prefetch_corrections(args);
    wait_for_kernels_before();
    // Behind the wait: the next kernel may begin with what needs neither plan nor help.
    bool const erases = blockIdx.x == 0 && args.sentinel_items > 0;
    if (!erases) let_next_kernel_start();
    if (blockIdx.x > 0) {
        helper(args, (blockIdx.x - 1) * blockDim.x + threadIdx.x, (gridDim.x - 1) * blockDim.x);
        return;
    }
    // The last warp, so that others route meanwhile.
    if (erases && threadIdx.x / 32 == blockDim.x / 32 - 1) {
        routing::erase_items(args);
        if (kSlots > 0 && args.tokens == 1) ptx::arrive<routing::kEraseThreads>();
        __threadfence();
        let_next_kernel_start();
    }
    __shared__ uint32_t memory[routing::kWords];
    __shared__ uint16_t chosen[kPlanTokens * TRT_NVFP4_MAX_TOP_K];
    if constexpr (kSlots > 0) {
        routing::route_tokens<kSlots>(args, 0, 1, memory, chosen);
        if (args.tokens == 1) return;
        __syncthreads();
        routing::sort_pairs(args, memory, [&](int pair) { return chosen[pair]; });
    } else {
        routing::sort_pairs(args, memory, [&](int pair) { return args.plan.experts[pair]; });
    }
}

}  // namespace trt_nvfp4
