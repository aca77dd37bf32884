#include "op.h"

#include "../kernels/scale_layout.cuh"

namespace trt_nvfp4 {
namespace {

std::string to_string(std::vector<int64_t> const& dims) {
    std::string text = "[";
    for (size_t i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    return text + "]";
}

}  // namespace

TrtNvfp4DataType Call::dtype() const {
    switch (input_descs[0].type) {
        case nvinfer1::DataType::kFLOAT:
            return TRT_NVFP4_FLOAT32;
        case nvinfer1::DataType::kHALF:
            return TRT_NVFP4_FLOAT16;
        case nvinfer1::DataType::kBF16:
            return TRT_NVFP4_BFLOAT16;
        default:
            throw std::invalid_argument(std::string(op.name) + ": input " + op.inputs[0].name +
                                        " must be float32, float16 or bfloat16, it is TensorRT data type " +
                                        std::to_string(static_cast<int>(input_descs[0].type)));
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

void Call::expect_scalar(int32_t input) const {
    if (dims(input).nbDims != 0) expect(input, {1});
}

std::vector<int64_t> scale_dims(int64_t rows, int64_t k, std::vector<int64_t> leading) {
    leading.push_back(round_up(rows, 128));
    leading.push_back(padded_blocks(k));
    return leading;
}

}  // namespace trt_nvfp4
