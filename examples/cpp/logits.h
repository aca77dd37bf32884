// Types of TensorRT's tensors, and the likeliest token of a row of logits.

#pragma once

#include <NvInfer.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace run_engines {

inline std::size_t bytes_of(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kINT64:
            return 8;
        case nvinfer1::DataType::kFLOAT:
        case nvinfer1::DataType::kINT32:
            return 4;
        case nvinfer1::DataType::kHALF:
        case nvinfer1::DataType::kBF16:
            return 2;
        // Caches with a scale per head hold FP8 values in bytes.
        case nvinfer1::DataType::kINT8:
        case nvinfer1::DataType::kBOOL:
            return 1;
        default:
            throw std::runtime_error("the engine has an input or output of a type that this program does not know");
    }
}

inline float to_float(nvinfer1::DataType type, void const* value) {
    if (type == nvinfer1::DataType::kFLOAT) {
        float wide;
        std::memcpy(&wide, value, sizeof(wide));
        return wide;
    }
    std::uint16_t half;
    std::memcpy(&half, value, sizeof(half));
    std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    if (type == nvinfer1::DataType::kHALF) {
        // Sign and magnitude as a float32 of 2^112 of its exponent's bias; subnormal numbers come out right.
        bits = (half & 0x8000u) << 16 | (half & 0x7fffu) << 13;
    }
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return type == nvinfer1::DataType::kHALF ? wide * 0x1p112f : wide;
}

// The token with the largest of `vocabulary` logits that begin at `row`.
inline std::int64_t likeliest(nvinfer1::DataType type, char const* row, std::int64_t vocabulary) {
    auto const item = static_cast<std::int64_t>(bytes_of(type));
    std::int64_t best = 0;
    float largest = to_float(type, row);
    for (std::int64_t token = 1; token < vocabulary; ++token) {
        float const value = to_float(type, row + token * item);
        if (value > largest) {
            best = token;
            largest = value;
        }
    }
    return best;
}

}  // namespace run_engines
