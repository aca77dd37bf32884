// Divisions of integers by what is known before, as multiplications: others take twenty instructions each, one after
// another.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace trt_nvfp4 {

class Divisor {
 public:
    Divisor() = default;
    TRT_NVFP4_HOST_DEVICE explicit Divisor(int divisor) : inverse_(0x7fffffffu / divisor + 1) {}

    // n / divisor, rounded down; n * divisor is below 2^30. What is divided lies between n and n + 1, in the middle, so
    // that the inverse's rounding up leads nowhere else.
    TRT_NVFP4_HOST_DEVICE int of(int n) const { return static_cast<int>(uint64_t{2u * n + 1} * inverse_ >> 32); }

 private:
    uint32_t inverse_;  // 2^31 / divisor, rounded up
};

}  // namespace trt_nvfp4
