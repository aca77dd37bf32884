// What op_definitions.h, the header that is written from the ops' Python definitions, is made of.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace trt_nvfp4 {

// Fixes a port's type: T is the type of input 0, one of float32, float16, bfloat16. Packed E2M1 and E4M3 block scales
// both travel as INT8 bytes: TensorRT-RTX 1.7 fails to build a layer that has INT8 and FP8 ports. Caches are T or INT8
// bytes, all of an op alike; lengths INT32 or INT64; states float32, float16 or bfloat16, T where none is given.
enum class Role { kT, kBytes, kFloat, kCache, kLength, kState };

struct Port {
    std::string name;
    Role role;
};

// ONNX numbers reach a plugin as INT32 or FLOAT32 whatever was declared, strings as CHAR. Integers have a range; floats
// are finite and not negative; a string is one of `choices`, and `integer` its place among them.
struct Attribute {
    char const* name;
    bool is_float;
    int32_t integer;
    float real;
    int32_t smallest, largest;
    std::vector<std::string> choices;

    bool is_string() const { return !choices.empty(); }
    std::string const& choice() const { return choices[integer]; }
};

inline Attribute int_attribute(char const* name, int32_t value, int32_t smallest, int32_t largest) {
    return {name, false, value, 0.0f, smallest, largest, {}};
}
inline Attribute float_attribute(char const* name, float value) { return {name, true, 0, value, 0, 0, {}}; }
inline Attribute string_attribute(char const* name, int32_t value, std::vector<std::string> choices) {
    return {name, false, value, 0.0f, 0, 0, std::move(choices)};
}

struct Definition {
    char const* name;
    std::vector<Port> inputs;
    int32_t required;  // inputs; the others are optional, from the last on
    std::vector<Port> outputs;
    std::vector<Attribute> attributes;  // with their defaults
};

template <typename... Ops>
struct OpList {};

}  // namespace trt_nvfp4
