#include "op.h"

#include "../kernels/formats/scale_layout.cuh"

namespace trt_nvfp4 {
namespace {

std::string to_string(std::vector<int64_t> const& dims) {
    std::string text = "[";
    for (size_t i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    return text + "]";
}

std::vector<int64_t> behind(std::vector<int64_t> leading, std::vector<int64_t> const& dims) {
    leading.insert(leading.end(), dims.begin(), dims.end());
    return leading;
}

}  // namespace

TrtNvfp4DataType Call::dtype(int32_t input) const {
    switch (input_descs[input].type) {
        case nvinfer1::DataType::kFLOAT:
            return TRT_NVFP4_FLOAT32;
        case nvinfer1::DataType::kHALF:
            return TRT_NVFP4_FLOAT16;
        case nvinfer1::DataType::kBF16:
            return TRT_NVFP4_BFLOAT16;
        default:
            throw std::invalid_argument(std::string(op.name) + ": input " + op.inputs[input].name +
                                        " must be float32, float16 or bfloat16, it is TensorRT data type " +
                                        std::to_string(static_cast<int>(input_descs[input].type)));
    }
}

int64_t Call::rows(int32_t input) const {
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < dims(input).nbDims; ++i) rows *= dims(input).d[i];
    return rows;
}

int64_t Call::last(int32_t input) const {
    if (dims(input).nbDims < 1) {
        throw std::invalid_argument(std::string(op.name) + ": input " + op.inputs[input].name + " has no dimension");
    }
    return dims(input).d[dims(input).nbDims - 1];
}

void Call::expect(int32_t input, std::vector<int64_t> const& expected) const {
    std::vector<int64_t> const found(dims(input).d, dims(input).d + dims(input).nbDims);
    if (found == expected) return;
    throw std::invalid_argument(std::string(op.name) + ": input " + op.inputs[input].name + " must have shape " +
                                to_string(expected) + ", it has " + to_string(found));
}

void Call::expect_rank(int32_t input, int32_t rank) const {
    if (dims(input).nbDims == rank) return;
    throw std::invalid_argument(std::string(op.name) + ": input " + op.inputs[input].name + " must have " +
                                std::to_string(rank) + " dimensions, it has " + std::to_string(dims(input).nbDims));
}

void Call::expect_scalar(int32_t input) const {
    if (dims(input).nbDims != 0) expect(input, {1});
}

void Call::expect_cache(int32_t input, int32_t fp8_cache) const {
    if ((type(input) == nvinfer1::DataType::kINT8) == (fp8_cache != 0)) return;
    throw std::invalid_argument(std::string(op.name) + ": caches must be INT8 (E4M3 bytes) with fp8_cache 1, and " +
                                op.inputs[0].name + "'s type with fp8_cache 0");
}

void Call::expect_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading) const {
    expect(first, behind(leading, {rows, k / 2}));
    expect(first + 1, behind(leading, {round_up(rows, 128), padded_blocks(k)}));
    leading.empty() ? expect_scalar(first + 2) : expect(first + 2, leading);
    expect(first + 3, behind(leading, {rows}));
}

void Call::expect_fp8_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading) const {
    expect(first, behind(leading, {rows, k}));
    expect(first + 1, behind(leading, {rows}));
    expect(first + 2, behind(leading, {rows}));
}

TrtNvfp4Weight Call::weight(int32_t first) const {
    return {input(first), input(first + 1), float_input(first + 2), input(first + 3)};
}

TrtNvfp4Fp8Weight Call::fp8_weight(int32_t first) const {
    return {input(first), float_input(first + 1), input(first + 2)};
}

ShapeRule::Dim ShapeRule::dimension(int32_t input, int32_t d) const {
    if (d < shape(input).nbDims) return shape(input).d[d];
    throw std::invalid_argument(std::string(op.name) + ": " + op.inputs[input].name + " has " +
                                std::to_string(shape(input).nbDims) + " dimensions, expected " + std::to_string(d + 1) +
                                " or more");
}

nvinfer1::DimsExprs ShapeRule::with_last(int32_t input, Dim last) const {
    nvinfer1::DimsExprs dims = shape(input);
    dims.d[dims.nbDims - 1] = last;
    return dims;
}

}  // namespace trt_nvfp4
