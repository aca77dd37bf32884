// GEMMs of all experts of a mixture in one launch: what they add to a single GEMM. Free of CUTLASS, as are the single
// GEMMs' headers.
#pragma once

#include <cstdint>

namespace trt_nvfp4 {

struct WorkItem;  // moe_plan.cuh

// Gated and plain write hidden, as the GEMMs of those names do; sums writes the rows of a W^T + bias in float32.
enum class ExpertsWrite { kGated, kPlain, kSums };

// w and bias are dense arrays over experts. The rows of `a`, and of hidden, lie in tiles: tile t has work
// items[t].count rows of one expert and then padding, whose content does not matter. Row i of tile t is row work
// items[t].first + i of the sums, which have no padding.
template <class Gemm>
struct ExpertsGemm : Gemm {
    int64_t experts;
    ExpertsWrite write;
    WorkItem const* items;  // null: expert 0 has all m rows, without padding
    int const* item_count;
};

}  // namespace trt_nvfp4
