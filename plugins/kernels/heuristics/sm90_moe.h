// Launch choices of the SM90 W4A16 kernel for mixtures of experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace trt_nvfp4::sm90 {

// Of a launch: more go in blocks of this many, which bounds the workspace.
constexpr int64_t kMixtureTokens = 256;
constexpr int kMixtureMaxSplits = 16;
// The most pairs of a job, as registers allow: an expert with more has several.
constexpr int kJobTokens = 24;

// Whether the launch that makes the plan makes images too.
inline bool makes_images_beside_plan(int64_t tokens) { return tokens <= 8; }

// Whether so many tiles of gate and up, of all jobs, are theirs. Of four models timed on an H200 at 1 to 8 tokens
// (benchmarks/NOTES.md) those with 1.3 tiles for an SM are not behind sm80_w4a16_moe.cuh, those with 1.0 are.
inline bool takes_mixture(double tiles, int sms) { return tiles >= 1.2 * sms; }

// Parts of down's K: `tiles` of all jobs by `chunks`, on `sms` SMs. Short tasks end at much the same time; a part has
// some chunks, because a task costs about one beside them.
inline int choose_mixture_splits(double tiles, int chunks, int sms) {
    constexpr double kTasks = 6.0;  // of an SM, that suffice
    constexpr int kFewestChunks = 4;
    int const wanted = static_cast<int>(std::ceil(kTasks * sms / tiles));
    return std::max(1, std::min({wanted, chunks / kFewestChunks, kMixtureMaxSplits}));
}

}  // namespace trt_nvfp4::sm90
