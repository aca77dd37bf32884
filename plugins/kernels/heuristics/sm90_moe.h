// Launch choices of the SM90 W4A16 kernel for mixtures of experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace trt_nvfp4::sm90 {

// Tokens of a launch: more go in blocks of this many, which bounds the workspace.
constexpr int64_t kMixtureTokens = 256;
constexpr int kMixtureMaxSplits = 16;
// The most pairs of a work item, as registers allow: an expert with more has several. Wide work items are multiplied by
// wgmma.
constexpr int kItemTokens = 24, kWideItemTokens = 32, kWidestItemTokens = 64;

// Which of them, where an expert that is chosen has so many pairs on average (benchmarks/notes). The widest have
// half as many staged tiles.
constexpr int choose_item_tokens(double pairs_of_expert) {
    if (pairs_of_expert <= 14.0) return kItemTokens;
    return pairs_of_expert <= 27.0 ? kWideItemTokens : kWidestItemTokens;
}

// The plan of so few tokens takes less than another launch: who makes it makes images beside it.
constexpr int64_t kImagesBesidePlan = 8;

// Whether a Divisor divides tickets by `of_item`, the tasks of each of so many work items.
constexpr bool divides_tickets(int64_t items, int64_t of_item) { return items * of_item * of_item <= 1 << 30; }

// True if SM90's kernel serves so many tiles of gate and up, over all work items. Sixteen models were timed on an H200
// at 1 to 4 tokens (benchmarks/notes): most with 0.36 tiles for an SM and more are ahead of sm80_w4a16_moe.cuh, by
// up to 35 %.
inline bool takes_mixture(double tiles, int sms) { return tiles >= 0.35 * sms; }

// Whether blocks share these tiles evenly, which takes a barrier more: where SMs would else have one or two, or none,
// and of so few tokens that work items have one column.
constexpr int64_t kEvenTokens = 8;
inline bool shares_evenly(int64_t tokens, double tiles, int sms) { return tokens <= kEvenTokens && tiles < 1.5 * sms; }

// The most parts of down's K: each has some chunks, because a task costs about one beside them.
inline int most_mixture_splits(int chunks) { return std::clamp(chunks / 4, 1, kMixtureMaxSplits); }

// Parts of down's K: `tiles` of all work items by `chunks`, on `sms` SMs. Short tasks end at much the same time.
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
