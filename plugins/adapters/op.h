// What an adapter needs to know of an op: its ports, its attributes, its shape rule and its calls into the kernels' C
// API. One file per op fills this in; plugin.h turns it into TensorRT's interfaces.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../interface/tensorrt.h"
#include "../kernels/api/trt_nvfp4.h"

namespace trt_nvfp4 {

// Fixes a port's type: T is the type of input 0, one of float32, float16, bfloat16. Packed E2M1 and E4M3 block scales
// both travel as INT8 bytes: TensorRT-RTX 1.7 fails to build a layer that has INT8 and FP8 ports. Caches are T or INT8
// bytes, all of an op alike; lengths INT32 or INT64.
enum class Role { kT, kBytes, kFloat, kCache, kLength };

struct Port {
    std::string name;
    Role role;
};

// The ports of an NVFP4 weight: <name>_weight, <name>_scales, <name>_tensor_scale, <name>_bias.
constexpr int32_t kWeightPorts = 4;
std::vector<Port> weight_ports(std::string const& name);
// The ports of an E4M3 weight: <name>_weight, <name>_scale, <name>_bias.
constexpr int32_t kFp8WeightPorts = 3;
std::vector<Port> fp8_weight_ports(std::string const& name);
std::vector<Port> join(std::vector<std::vector<Port>> const& parts);

// ONNX attributes reach a plugin as INT32 or FLOAT32 whatever was declared, so an op has no other kind.
struct Attribute {
    char const* name;
    bool is_float;
    int32_t integer;
    float real;
};

inline Attribute int_attribute(char const* name, int32_t value) { return {name, false, value, 0.0f}; }
inline Attribute float_attribute(char const* name, float value) { return {name, true, 0, value}; }

// An op's attributes with their values, in the op's order.
class Attributes {
 public:
    explicit Attributes(std::vector<Attribute> values) : values_(std::move(values)) {}

    int32_t integer(std::string const& name) const { return find(name).integer; }
    float real(std::string const& name) const { return find(name).real; }
    std::vector<Attribute>& values() { return values_; }
    std::vector<Attribute> const& values() const { return values_; }

 private:
    Attribute const& find(std::string const& name) const {
        for (Attribute const& attribute : values_) {
            if (name == attribute.name) return attribute;
        }
        throw std::logic_error("the op has no attribute " + name);
    }

    std::vector<Attribute> values_;
};

struct Op;

// One use of an op at given shapes. The pointers are null where only sizes are asked for.
struct Call {
    Op const& op;
    Attributes const& attributes;
    TrtNvfp4Tactic tactic;
    nvinfer1::PluginTensorDesc const* input_descs;
    void const* const* inputs;
    void* const* outputs;

    nvinfer1::Dims const& dims(int32_t input) const { return input_descs[input].dims; }
    void const* input(int32_t index) const { return inputs == nullptr ? nullptr : inputs[index]; }
    float const* float_input(int32_t index) const { return static_cast<float const*>(input(index)); }
    void* output(int32_t index) const { return outputs == nullptr ? nullptr : outputs[index]; }

    TrtNvfp4DataType dtype() const;
    nvinfer1::DataType type(int32_t input) const { return input_descs[input].type; }
    // Product of all dimensions but the last.
    int64_t rows(int32_t input) const;
    int64_t last(int32_t input) const;
    // Throws std::invalid_argument naming the port, what was expected and what was found.
    void expect(int32_t input, std::vector<int64_t> const& expected) const;
    // Of `rank` dimensions.
    void expect_rank(int32_t input, int32_t rank) const;
    // One element, whatever the rank: TensorRT's plans hold ONNX scalars as [1].
    void expect_scalar(int32_t input) const;
    // Of the ports of an NVFP4 weight from `first` on; `leading` are dimensions in front, of layers or experts.
    void expect_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading = {}) const;
    TrtNvfp4Weight weight(int32_t first) const;
    // The same of an E4M3 weight.
    void expect_fp8_weight(int32_t first, int64_t rows, int64_t k, std::vector<int64_t> const& leading = {}) const;
    TrtNvfp4Fp8Weight fp8_weight(int32_t first) const;
};

// Symbolic dimensions with ordinary spelling.
struct ShapeBuilder {
    nvinfer1::IExprBuilder& builder;

    using Dim = nvinfer1::IDimensionExpr const*;
    Dim constant(int64_t value) { return builder.constant(value); }
    Dim product(Dim a, Dim b) { return builder.operation(nvinfer1::DimensionOperation::kPROD, *a, *b); }
    Dim quotient(Dim a, int64_t b) {
        return builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *a, *constant(b));
    }
    Dim round_up(Dim a, int64_t to) {
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

struct Op {
    char const* name;
    std::vector<Port> inputs;
    std::vector<Port> outputs;
    std::vector<Attribute> attributes;
    void (*output_shapes)(nvinfer1::DimsExprs const* inputs, ShapeBuilder shapes, nvinfer1::DimsExprs* outputs);
    KernelCalls kernels;
};

// Dimension d of an input, by the input's name. A rank is not checked before the shape rule runs.
inline nvinfer1::IDimensionExpr const* dimension(nvinfer1::DimsExprs const& dims, int32_t d, char const* name) {
    if (d < dims.nbDims) return dims.d[d];
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(dims.nbDims) + " dimensions, expected " +
                                std::to_string(d + 1) + " or more");
}

// x's dimensions with another last one.
inline nvinfer1::DimsExprs with_last(nvinfer1::DimsExprs dims, nvinfer1::IDimensionExpr const* last) {
    dims.d[dims.nbDims - 1] = last;
    return dims;
}

Op const& linear_op();
Op const& gated_mlp_op();
Op const& persistent_mlp_op();
Op const& fp8_gated_mlp_op();
Op const& moe_op();
Op const& fp8_moe_op();
Op const& quantize_op();
Op const& cached_attention_op();
Op const& decoder_op();

}  // namespace trt_nvfp4
