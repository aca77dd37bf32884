// GEMMs of the experts of a mixture on Blackwell's block-scaled tensor cores, all experts in one launch.
#pragma once

#include "w4a4_gemm.h"

namespace trt_nvfp4 {

struct ExpertJob;  // moe_plan.cuh

constexpr int kExpertRows = 128;  // of a tile: the most pairs of a job

// Gated and plain write hidden, as the GEMMs of those names do; sums writes the rows of a W^T + bias to `partials`.
enum class ExpertsWrite { kGated, kPlain, kSums };

// w and bias are dense arrays over experts. The rows of `a`, and of hidden, lie in tiles: tile t has jobs[t].count rows
// of one expert and then padding, whose content does not matter. Row i of tile t is row jobs[t].first + i of the sums,
// which have no padding.
struct W4A4ExpertsGemm : W4A4Gemm {
    int64_t experts;
    ExpertsWrite write;
    ExpertJob const* jobs;  // null: expert 0 has all m rows, without padding
    int const* job_count;
};

TrtNvfp4Status sm100_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream);
TrtNvfp4Status sm120_w4a4_experts(W4A4ExpertsGemm const& gemm, cudaStream_t stream);

}  // namespace trt_nvfp4
