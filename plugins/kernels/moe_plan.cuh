// Routing on the GPU: which experts each token goes to and with what weight, and the (token, expert) pairs sorted by
// expert and cut into jobs. All kernels of NVFP4MoE start from this plan.
#pragma once

#include "activation.cuh"
#include "api/launch.h"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

// A run of pairs in sorted order that go to one expert.
struct __align__(16) ExpertJob {
    int expert, first, count;
    int cost_before;  // of the jobs before this one, see job_cost
};

// What a task of a job of `count` pairs takes, in quarters of the time that its weights take to arrive: columns are
// multiplied, and their activations staged, in eights, doubled up (an estimate).
__host__ __device__ constexpr int job_cost(int count) {
    return count <= 8 ? 5 : count <= 16 ? 6 : count <= 32 ? 9 : 18;
}

// Pair p = token * top_k + rank.
struct MoePlan {
    int* experts;          // [pairs]
    float* weights;        // [pairs]
    int* position;         // [pairs] of a pair in sorted order
    int* order;            // [pairs] the pair at a position
    float* shared_factor;  // [tokens] of the shared expert's output
    ExpertJob* jobs;       // [most_jobs]
    int* job_count;        // [1]
    int* total_cost;       // [1] of all jobs
};

struct RouteArgs {
    TrtNvfp4Scoring scoring;
    bool renormalize;
    int tokens, experts, hidden, top_k, groups, open_groups, group_score_top;
    float scaling_factor;
    float const* logits;           // [tokens, experts]
    float const* correction_bias;  // [experts]
    void const* x;                 // T [tokens, hidden], and
    void const* shared_gate;       // T [hidden]: null where the shared expert has no gate
    MoePlan plan;
    int job_tokens;   // most pairs of a job
    void* absent;     // erased to 0xff, 16-byte aligned
    int64_t absents;  // bytes, a multiple of 16
};

constexpr int kRouteThreads = 256;
constexpr int kPlanThreads = TRT_NVFP4_MAX_EXPERTS;
constexpr int kRouteShared = 40 << 10;  // beside what sorting takes of 48 KiB
constexpr int kPlanTokens = 64;         // up to here the plan's one block routes as well

// Jobs that any routing of `pairs` pairs may make.
inline int64_t most_jobs(int64_t pairs, int64_t experts, int64_t job_tokens) {
    return std::min(pairs, experts + pairs / job_tokens);
}

// Shared memory of a warp that routes: scores, keys and the groups' scores.
__host__ __device__ constexpr int route_bytes(int experts) { return experts * 3 * static_cast<int>(sizeof(float)); }

// Warps of a block of `threads` that have shared memory to route with.
__host__ __device__ inline int routing_warps(int threads, int experts) {
    int const fit = kRouteShared / route_bytes(experts);
    return fit < threads / 32 ? fit : threads / 32;
}

namespace routing {

constexpr float kLargest = 3.402823466e38f;

// NaN counts as the smallest float32, infinities as the largest and the smallest.
__device__ __forceinline__ float finite(float x) { return isnan(x) ? -kLargest : fminf(fmaxf(x, -kLargest), kLargest); }

__device__ __forceinline__ float warp_largest(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Index of the largest of keys[0..count), the lower one of equals; every lane gets it. -inf is never chosen while
// anything else is there.
__device__ __forceinline__ int warp_argmax(float const* keys, int count) {
    int const lane = threadIdx.x % 32;
    float best = -INFINITY;
    int index = count;
    for (int i = lane; i < count; i += 32) {
        if (keys[i] > best) {
            best = keys[i];
            index = i;
        }
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        float const other = __shfl_xor_sync(0xffffffffu, best, offset);
        int const other_index = __shfl_xor_sync(0xffffffffu, index, offset);
        if (other > best || (other == best && other_index < index)) {
            best = other;
            index = other_index;
        }
    }
    return index;
}

// Sum of the `best` largest keys of a group. One lane per group.
__device__ __forceinline__ float group_score(float const* keys, int size, int best) {
    float sum = 0.0f;
    float below = INFINITY;  // the last one counted, and how often it was
    int counted = 0;
    while (counted < best) {
        float largest = -INFINITY;
        int times = 0;
        for (int i = 0; i < size; ++i) {
            if (keys[i] >= below) continue;
            if (keys[i] > largest) {
                largest = keys[i];
                times = 0;
            }
            times += keys[i] == largest;
        }
        for (int i = 0; i < times && counted < best; ++i, ++counted) sum += largest;
        below = largest;
    }
    return sum;
}

// Experts outside the best groups get the key -inf.
__device__ __forceinline__ void close_groups(RouteArgs const& args, float* keys, float* scores) {
    int const lane = threadIdx.x % 32;
    int const size = args.experts / args.groups;
    for (int g = lane; g < args.groups; g += 32) scores[g] = group_score(keys + g * size, size, args.group_score_top);
    __syncwarp();
    for (int g = lane; g < args.groups; g += 32) {
        int better = 0;
        for (int other = 0; other < args.groups; ++other) {
            better += scores[other] > scores[g] || (scores[other] == scores[g] && other < g);
        }
        if (better < args.open_groups) continue;
        for (int i = 0; i < size; ++i) keys[g * size + i] = -INFINITY;
    }
    __syncwarp();
}

// One token by one warp. `memory` holds route_bytes.
template <typename T>
__device__ void route(RouteArgs const& args, int token, float* memory) {
    int const lane = threadIdx.x % 32;
    int const count = args.experts;
    float* const scores = memory;
    float* const keys = memory + count;
    __syncwarp();
    float largest = -kLargest;
    for (int e = lane; e < count; e += 32) {
        scores[e] = finite(args.logits[static_cast<int64_t>(token) * count + e]);
        largest = fmaxf(largest, scores[e]);
    }
    if (args.scoring == TRT_NVFP4_SOFTMAX) {
        largest = warp_largest(largest);
        float total = 0.0f;
        for (int e = lane; e < count; e += 32) {
            scores[e] = expf(scores[e] - largest);
            total += scores[e];
        }
        total = ptx::warp_sum(total);
        for (int e = lane; e < count; e += 32) scores[e] = scores[e] / total;
    } else if (args.scoring == TRT_NVFP4_SIGMOID) {
        for (int e = lane; e < count; e += 32) scores[e] = sigmoid(scores[e]);
    }
    for (int e = lane; e < count; e += 32) keys[e] = finite(scores[e] + args.correction_bias[e]);
    __syncwarp();
    if (args.groups > 1) close_groups(args, keys, memory + 2 * count);

    // Lane r % 32 keeps rank r.
    constexpr int kPerLane = TRT_NVFP4_MAX_TOP_K / 32;
    int expert[kPerLane] = {};
    float weight[kPerLane] = {};
    for (int rank = 0; rank < args.top_k; ++rank) {
        int const chosen = warp_argmax(keys, count);
        if (lane == rank % 32) {
            (rank < 32 ? expert[0] : expert[1]) = chosen;
            (rank < 32 ? weight[0] : weight[1]) = scores[chosen];
            keys[chosen] = -INFINITY;
        }
        __syncwarp();
    }
    bool const has[kPerLane] = {lane < args.top_k, lane + 32 < args.top_k};
    if (args.scoring == TRT_NVFP4_SOFTMAX_OF_CHOSEN) {
        largest = -INFINITY;
        for (int i = 0; i < kPerLane; ++i) largest = has[i] ? fmaxf(largest, weight[i]) : largest;
        largest = warp_largest(largest);
        float total = 0.0f;
        for (int i = 0; i < kPerLane; ++i) {
            weight[i] = has[i] ? expf(weight[i] - largest) : 0.0f;
            total += weight[i];
        }
        total = ptx::warp_sum(total);
        for (int i = 0; i < kPerLane; ++i) weight[i] = weight[i] / total;
    } else if (args.scoring == TRT_NVFP4_SIGMOID_OF_CHOSEN) {
        for (int i = 0; i < kPerLane; ++i) weight[i] = sigmoid(weight[i]);
    }
    if (args.renormalize) {
        float total = 0.0f;
        for (int i = 0; i < kPerLane; ++i) total += has[i] ? weight[i] : 0.0f;
        total = ptx::warp_sum(total) + 1e-20f;
        for (int i = 0; i < kPerLane; ++i) weight[i] = weight[i] / total;
    }
    for (int i = 0; i < kPerLane; ++i) {
        if (!has[i]) continue;
        int const pair = token * args.top_k + lane + 32 * i;
        args.plan.experts[pair] = expert[i];
        args.plan.weights[pair] = weight[i] * args.scaling_factor;
    }

    float factor = 1.0f;
    if (args.shared_gate != nullptr) {
        T const* const x = static_cast<T const*>(args.x) + static_cast<int64_t>(token) * args.hidden;
        T const* const gate = static_cast<T const*>(args.shared_gate);
        float dot = 0.0f;
        for (int i = lane; i < args.hidden; i += 32) dot = fmaf(ptx::to_float(x[i]), ptx::to_float(gate[i]), dot);
        factor = sigmoid(ptx::warp_sum(dot));
    }
    if (lane == 0) args.plan.shared_factor[token] = factor;
}

// Tokens first, first + step, ... by the block's warps.
template <typename T>
__device__ __forceinline__ void route_tokens(RouteArgs const& args, int first, int step, float* memory) {
    int const warps = routing_warps(blockDim.x, args.experts);
    int const warp = threadIdx.x / 32;
    if (warp >= warps) return;
    for (int token = first * warps + warp; token < args.tokens; token += step * warps) {
        route<T>(args, token, memory + warp * (route_bytes(args.experts) / 4));
    }
}

// Sum of the values of the block's earlier threads; `total` gets that of all.
__device__ __forceinline__ int exclusive_sum(int value, int* sums, int& total) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int inclusive = value;
    for (int offset = 1; offset < 32; offset <<= 1) {
        int const before = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (lane >= offset) inclusive += before;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    int base = 0;
    total = 0;
#pragma unroll 4
    for (int i = 0; i < kPlanThreads / 32; ++i) {
        if (i < warp) base += sums[i];
        total += sums[i];
    }
    return base + inclusive - value;
}

// Counting sort of the pairs by expert. The order within an expert is whatever the atomics make it: no result depends
// on it.
__device__ __forceinline__ void sort_pairs(RouteArgs const& args) {
    __shared__ int counts[kPlanThreads];
    __shared__ int sums[kPlanThreads / 32];
    MoePlan const& plan = args.plan;
    int const pairs = args.tokens * args.top_k;
    int const expert = threadIdx.x;
    counts[expert] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads) atomicAdd(&counts[plan.experts[pair]], 1);
    __syncthreads();
    int const count = counts[expert];
    int const jobs = (count + args.job_tokens - 1) / args.job_tokens;
    int const full_cost = job_cost(args.job_tokens);
    int const cost = count == 0 ? 0 : (jobs - 1) * full_cost + job_cost(count - (jobs - 1) * args.job_tokens);
    int total_pairs, total_jobs, total_cost;
    int const first = exclusive_sum(count, sums, total_pairs);
    int const first_job = exclusive_sum(jobs, sums, total_jobs);
    int const first_cost = exclusive_sum(cost, sums, total_cost);
    for (int job = 0; job < jobs; ++job) {
        int const done = job * args.job_tokens;
        plan.jobs[first_job + job] = {expert, first + done, min(args.job_tokens, count - done),
                                      first_cost + job * full_cost};
    }
    if (expert == 0) {
        *plan.job_count = total_jobs;
        *plan.total_cost = total_cost;
    }
    counts[expert] = first;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads) {
        int const position = atomicAdd(&counts[plan.experts[pair]], 1);
        plan.position[pair] = position;
        plan.order[position] = pair;
    }
}

}  // namespace routing

template <typename T>
__global__ __launch_bounds__(kRouteThreads) void moe_route(__grid_constant__ RouteArgs const args) {
    extern __shared__ float route_memory[];
    routing::route_tokens<T>(args, blockIdx.x, gridDim.x, route_memory);
}

// Block 0 sorts, and routes first where tokens are few: a launch less. The others erase.
template <typename T>
__global__ __launch_bounds__(kPlanThreads) void moe_plan(__grid_constant__ RouteArgs const args) {
    extern __shared__ float route_memory[];
    if (blockIdx.x > 0) {
        uint4 const absent = make_uint4(~0u, ~0u, ~0u, ~0u);
        for (int64_t i = (blockIdx.x - 1) * kPlanThreads + threadIdx.x; i < args.absents / 16;
             i += (gridDim.x - 1) * kPlanThreads) {
            static_cast<uint4*>(args.absent)[i] = absent;
        }
        return;
    }
    if (args.tokens <= kPlanTokens) {
        routing::route_tokens<T>(args, 0, 1, route_memory);
        __syncthreads();
    }
    routing::sort_pairs(args);
}

template <typename T>
TrtNvfp4Status launch_plan(RouteArgs const& args, cudaStream_t stream) {
    size_t const plan_bytes =
        static_cast<size_t>(routing_warps(kPlanThreads, args.experts) * route_bytes(args.experts));
    if (args.tokens > kPlanTokens) {
        int const warps = routing_warps(kRouteThreads, args.experts);
        size_t const bytes = static_cast<size_t>(warps * route_bytes(args.experts));
        moe_route<T><<<static_cast<unsigned>((args.tokens + warps - 1) / warps), kRouteThreads, bytes, stream>>>(args);
        TRT_NVFP4_RETURN_IF_ERROR(check_cuda(cudaGetLastError(), "moe_route"));
    }
    constexpr int64_t kBytesPerBlock = kPlanThreads * 16 * 4;
    constexpr int64_t kMaxErasers = 128;
    int64_t const erasers = std::min((args.absents + kBytesPerBlock - 1) / kBytesPerBlock, kMaxErasers);
    moe_plan<T><<<static_cast<unsigned>(1 + erasers), kPlanThreads, plan_bytes, stream>>>(args);
    return check_cuda(cudaGetLastError(), "moe_plan");
}

}  // namespace trt_nvfp4
