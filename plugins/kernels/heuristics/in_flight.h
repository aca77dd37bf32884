// How many copies of weights are under way while blocks wait for what others compute: other blocks of an MLP, or the
// launch before a small linear.
#pragma once

#include <algorithm>

namespace trt_nvfp4 {

constexpr int kMostInFlight = 4;

// Copies of so many bytes: together what an SM's share of memory's bandwidth, in bytes a second (0: not known), brings
// in 1.47 us. With more of them blocks wait longer for each other, with fewer for memory: an H200 takes 55 KB and an
// H100 37 KB, as was measured fastest there (benchmarks/NOTES.md).
inline int choose_in_flight(int copy_bytes, int sms, float bandwidth) {
    constexpr float kSeconds = 1.47e-6f;
    constexpr int kUnknown = 3;
    if (bandwidth <= 0.0f) return kUnknown;
    float const copies = bandwidth / static_cast<float>(sms) * kSeconds / static_cast<float>(copy_bytes);
    return std::clamp(static_cast<int>(copies + 0.5f), 1, kMostInFlight);
}

}  // namespace trt_nvfp4
