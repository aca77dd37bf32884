// What an adapter adds to an op's definition: its shape rule and its calls into the kernels' C API. One file per op
// fills this in; plugin.h turns it into TensorRT's interfaces.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../interface/tensorrt.h"
#include "../kernels/api/trt_nvfp4.h"
#include "op_definitions.h"

namespace trt_nvfp4 {

// The ports of an NVFP4 weight follow one another: <name>_weight, <name>_scales, <name>_tensor_scale, <name>_bias; so
// do those of an E4M3 weight: <name>_weight, <name>_scale, <name>_bias.

struct Op;

// One use of an op at given shapes. The pointers are null where only sizes are computed.
struct Call {
    Op const& op;
    std::vector<Attribute> const& attributes;
    TrtNvfp4Tactic tactic;
    int32_t input_count;
    nvinfer1::PluginTensorDesc const* input_descs;
    void const* const* inputs;
    void* const* outputs;

    bool has(int32_t input) const { return input < input_count; }
    nvinfer1::Dims const& dims(int32_t input) const { return input_descs[input].dims; }
    void const* input(int32_t index) const { return inputs == nullptr || !has(index) ? nullptr : inputs[index]; }
    float const* float_input(int32_t index) const { return static_cast<float const*>(input(index)); }
    void* output(int32_t index) const { return outputs == nullptr ? nullptr : outputs[index]; }

    TrtNvfp4DataType dtype(int32_t input = 0) const;
    nvinfer1::DataType type(int32_t input) const { return input_descs[input].type; }
    // Product of all dimensions but the last.
    int64_t rows(int32_t input) const;
    int64_t last(int32_t input) const;
    // Throws std::invalid_argument naming the port, what was expected and what was found.
    void expect(int32_t input, std::vector<int64_t> const& expected) const;
    // Throws unless the input has `rank` dimensions.
    void expect_rank(int32_t input, int32_t rank) const;
    // One element, whatever the rank: TensorRT's plans hold ONNX scalars as [1].
    void expect_scalar(int32_t input) const;
    // Whether the cache's type is what the attribute fp8_cache says.
    void expect_cache(int32_t input, int32_t fp8_cache) const;
    // Throws unless the ports from `first` on hold an NVFP4 weight; `leading`: dimensions for layers or experts.
    void expect_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading = {}) const;
    TrtNvfp4Weight weight(int32_t first) const;
    // The same of an E4M3 weight.
    void expect_fp8_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading = {}) const;
    TrtNvfp4Fp8Weight fp8_weight(int32_t first) const;
};

// What an op's shape rule reads: its inputs' symbolic dimensions, and arithmetic on them.
struct ShapeRule {
    Definition const& op;
    std::vector<Attribute> const& attributes;
    int32_t input_count;
    nvinfer1::DimsExprs const* inputs;
    nvinfer1::IExprBuilder& builder;

    using Dim = nvinfer1::IDimensionExpr const*;
    nvinfer1::DimsExprs const& shape(int32_t input) const { return inputs[input]; }
    // Throws std::invalid_argument where the input has fewer dimensions: ranks are not checked before a rule runs.
    Dim dimension(int32_t input, int32_t d) const;
    // The input's shape with another last dimension.
    nvinfer1::DimsExprs with_last(int32_t input, Dim last) const;
    Dim constant(int64_t value) const { return builder.constant(value); }
    Dim sum(Dim a, Dim b) const { return builder.operation(nvinfer1::DimensionOperation::kSUM, *a, *b); }
    Dim product(Dim a, Dim b) const { return builder.operation(nvinfer1::DimensionOperation::kPROD, *a, *b); }
    Dim quotient(Dim a, int64_t b) const {
        return builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *a, *constant(b));
    }
    Dim round_up(Dim a, int64_t to) const {
        return product(builder.operation(nvinfer1::DimensionOperation::kCEIL_DIV, *a, *constant(to)), constant(to));
    }
};

// An op's calls into the kernels' C API. They throw std::invalid_argument for shapes that do not fit together.
struct KernelCalls {
    TrtNvfp4Status (*workspace)(Call const& call, size_t* bytes);
    TrtNvfp4Status (*tactics)(Call const& call, TrtNvfp4Tactics* tactics);
    TrtNvfp4Status (*run)(Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream);
};

// `read` makes the C API's arguments of a Call; the others are that API's functions.
template <auto read, auto query_workspace, auto query_tactics, auto launch>
constexpr KernelCalls kernel_calls() {
    return {[](Call const& call, size_t* bytes) {
                auto const arguments = read(call);
                return query_workspace(&arguments, bytes);
            },
            [](Call const& call, TrtNvfp4Tactics* tactics) {
                auto const arguments = read(call);
                return query_tactics(&arguments, tactics);
            },
            [](Call const& call, void* workspace, size_t bytes, TrtNvfp4Stream stream) {
                auto const arguments = read(call);
                return launch(&arguments, workspace, bytes, stream);
            }};
}

struct Op : Definition {
    void (*output_shapes)(ShapeRule const& rule, nvinfer1::DimsExprs* outputs);
    KernelCalls kernels;
};

// The op's adapter, in a file of its own: what its definition does not say.
template <typename Definition>
Op const& adapter();

}  // namespace trt_nvfp4
