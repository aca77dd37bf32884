// Launch choices of the SM90 W4A16 kernel for mixtures of experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace trt_nvfp4::sm90 {

// Of a launch: more go in blocks of this many, which bounds the workspace.
constexpr int64_t kMixtureTokens = 256;
constexpr int kMixtureMaxSplits = 16;
// The most pairs of a job, as registers allow: an expert with more has several. Wide jobs are multiplied by wgmma.
constexpr int kJobTokens = 24, kWideJobTokens = 32, kWidestJobTokens = 64;

// Which of them, where an expert that is chosen has so many pairs on average (benchmarks/NOTES.md). The widest have
// half as many panels.
constexpr int choose_job_tokens(double pairs_of_expert) {
    if (pairs_of_expert <= 14.0) return kJobTokens;
    return pairs_of_expert <= 27.0 ? kWideJobTokens : kWidestJobTokens;
}

// The plan of so few tokens takes less than another launch: who makes it makes images beside it.
constexpr int64_t kImagesBesidePlan = 8;

// Whether a Divisor divides tickets by `of_job`, the tasks of each of so many jobs.
constexpr bool divides_tickets(int64_t jobs, int64_t of_job) { return jobs * of_job * of_job <= 1 << 30; }

// Whether so many tiles of gate and up, of all jobs, are theirs. Of sixteen models timed on an H200 at 1 to 4 tokens
// (benchmarks/NOTES.md) most with 0.36 tiles for an SM and more are ahead of sm80_w4a16_moe.cuh, by up to 35 %.
inline bool takes_mixture(double tiles, int sms) { return tiles >= 0.35 * sms; }

// Whether blocks share these tiles evenly, which takes a meeting more: where SMs would else have one or two, or none,
// and of so few tokens that jobs have one column.
constexpr int64_t kEvenTokens = 8;
inline bool shares_evenly(int64_t tokens, double tiles, int sms) { return tokens <= kEvenTokens && tiles < 1.5 * sms; }

// The most parts of down's K: each has some chunks, because a task costs about one beside them.
inline int most_mixture_splits(int chunks) { return std::clamp(chunks / 4, 1, kMixtureMaxSplits); }

// Parts of down's K: `tiles` of all jobs by `chunks`, on `sms` SMs. Short tasks end at much the same time.
inline int choose_mixture_splits(double tiles, int chunks, int sms) {
    constexpr double kTasks = 6.0;  // of an SM, that suffice
    return std::min(static_cast<int>(std::ceil(kTasks * sms / tiles)), most_mixture_splits(chunks));
}

// The same where blocks share tiles of up evenly: they come to down together, and take its tasks in rounds.
inline int choose_even_splits(double tiles, int chunks, int sms) {
    constexpr double kTask = 0.85;  // a task's time beside its chunks, in theirs
    auto const time = [&](int splits) {
        return std::ceil(tiles * splits / sms) * (std::ceil(static_cast<double>(chunks) / splits) + kTask);
    };
    int best = 1;
    for (int splits = 2; splits <= most_mixture_splits(chunks); ++splits) {
        if (time(splits) < time(best)) best = splits;
    }
    return best;
}

}  // namespace trt_nvfp4::sm90
