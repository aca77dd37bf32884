// Activations of the jobs of sm90_w4a16_moe.cuh.
#pragma once

#include "ptx/grid.cuh"
#include "sm90_w4a16_moe_tasks.cuh"

namespace trt_nvfp4::sm90 {

// A warp's lanes make kFactorK values of K of eight tokens at a time.
constexpr int kEights = kFactorK / 32;

template <typename T>
__device__ __forceinline__ void scale_eights(float factor, uint4 (&eights)[kEights]) {
#pragma unroll
    for (uint4& eight : eights) {
        T* const values = reinterpret_cast<T*>(&eight);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = ptx::from_float<T>(ptx::to_float(values[j]) * factor);
    }
}

// As FP16. Returns the factor.
__device__ __forceinline__ float to_half(uint4 (&eights)[kEights]) {
    uint32_t most = 0;
#pragma unroll
    for (uint4 const& eight : eights) most = max(most, greatest_of(eight));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    HalfScale const scale(most);
#pragma unroll
    for (uint4& eight : eights) eight = scale.of(eight);
    return scale.factor();
}

constexpr int kImageThreads = 256;

__host__ __device__ constexpr int image_parts(int k) { return chunks_of(k) * (kChunk / kFactorK); }

// Blocks x, y: a job, the shared expert's first; a part of its image. Zeros where a job has no token, and where the
// hidden values' image is longer than the tiles of up.
template <typename T>
__global__ __launch_bounds__(kImageThreads) void sm90_w4a16_moe_images(__grid_constant__ MixtureArgs<T> const args) {
    ptx::launch_next();
    ptx::await_previous_launch();
    int const thread = (blockIdx.y * gridDim.x + blockIdx.x) * kImageThreads + threadIdx.x;
    for (int i = thread; i < args.counters; i += gridDim.x * gridDim.y * kImageThreads) args.ticket[i] = 0;

    int const segment = static_cast<int>(blockIdx.x) < args.shared_jobs ? kShared : kRouted;
    int const job = segment == kShared ? blockIdx.x : blockIdx.x - args.shared_jobs;
    int first = job * kJobTokens, tokens = min(kJobTokens, args.m - first);
    if (segment == kRouted) {
        if (job >= *args.plan.job_count) return;
        first = args.plan.jobs[job].first;
        tokens = args.plan.jobs[job].count;
    }
    Projection<T> const& up = args.matrices[kUp][segment];
    Projection<T> const& down = args.matrices[kDown][segment];
    JobImage<T> const image(up.x, up.k, job, first);
    int const columns = job_columns(tokens);
    int const lane = threadIdx.x % 32;
    int const t = lane % 4;
    int const parts = image_parts(up.k) * columns;
#pragma unroll 1
    for (int i = blockIdx.y * (kImageThreads / 32) + threadIdx.x / 32; i < parts;
         i += gridDim.y * (kImageThreads / 32)) {
        int const part = i / columns, token = i % columns * 8 + lane / 4, k = part * kFactorK;
        T const* row = nullptr;
        float weight = 1.0f;
        if (token < tokens) {
            int at = first + token;
            if (segment == kRouted) {
                int const pair = args.plan.order[at];
                at = pair / args.top_k;
                if (args.scale_input) weight = args.plan.weights[pair];
            }
            row = args.x + static_cast<int64_t>(at) * up.k + k;
        }
        uint4 eights[kEights];
        load_eights(row, t, up.k - k, eights);
        if (args.scale_input && segment == kRouted) scale_eights<T>(weight, eights);
        if constexpr (JobImage<T>::kHasFactors) {
            float const factor = to_half(eights);
            if (t == 0) image.factor(part, token) = factor;
        }
        auto* const units = reinterpret_cast<uint8_t*>(image.unit(part * (kFactorK / 8), token - token % 8));
        store_eights<typename JobImage<T>::Value>(units, 8, token % 8, t, eights);
    }
    JobImage<T> const hidden(up.image, down.k, job, first);
    int const begin = tiles_of(up.rows) * kTileRows / (up.gated ? 2 : 1) / 8;
    int const zeros = (chunks_of(down.k) * (kChunk / 8) - begin) * columns * 8;
    for (int i = blockIdx.y * kImageThreads + threadIdx.x; i < zeros; i += gridDim.y * kImageThreads) {
        int const unit = begin + i / (columns * 8), token = i % (columns * 8);
        *hidden.unit(unit, token) = make_uint4(0u, 0u, 0u, 0u);
        if (JobImage<T>::kHasFactors && unit % (kFactorK / 8) == 0) hidden.factor(unit / (kFactorK / 8), token) = 0.0f;
    }
}

}  // namespace trt_nvfp4::sm90
