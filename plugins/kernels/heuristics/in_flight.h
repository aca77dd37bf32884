// How many copies of weights are in flight while blocks wait for what others compute: other blocks of an MLP, or the
// launch before a small linear.
#pragma once

#include <algorithm>

namespace trt_nvfp4 {

constexpr int kMostInFlight = 4;
// How long memory should be busy with them. Two launches of small linears share an SM, which then has twice as much
// in flight.
constexpr float kMlpSeconds = 1.47e-6f, kSmallSeconds = 1.2e-6f;

// Copies of so many bytes: together what an SM's share of memory's bandwidth, in bytes a second (0: not known), brings
// in so many seconds. With more of them blocks wait longer for each other, with fewer for memory: an MLP takes 55 KB on
// an H200 and 37 KB on an H100, a small linear 37 KB on both, as was measured fastest there (benchmarks/notes).
inline int choose_in_flight(int copy_bytes, int sms, float bandwidth, float seconds = kMlpSeconds) {
    constexpr int kUnknown = 3;
    if (bandwidth <= 0.0f) return kUnknown;
    float const copies = bandwidth / static_cast<float>(sms) * seconds / static_cast<float>(copy_bytes);
    return std::clamp(static_cast<int>(copies + 0.5f), 1, kMostInFlight);
}

}  // namespace trt_nvfp4
