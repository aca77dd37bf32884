#include "plugin.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "../kernels/api/launch.h"

namespace trt_nvfp4 {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// TensorRT's ONNX parser looks a creator up by op type, version "1" and no namespace.
constexpr char const* kVersion = "1";
constexpr char const* kNamespace = "";
// A field of engines, beside the attributes.
constexpr char const* kWorkspaceField = "workspace_kib";

// TensorRT swallows errors of some calls, so each is recorded for trtNvfp4LastError before `failure` is returned.
template <typename F, typename R>
R guard(F&& f, R failure) noexcept {
    auto const fail = [&](char const* what) {
        try {
            record_error(TRT_NVFP4_INVALID_ARGUMENT, what);
        } catch (...) {  // out of memory: nothing left to record with
        }
        return failure;
    };
    try {
        return f();
    } catch (std::exception const& error) {
        return fail(error.what());
    } catch (...) {  // TensorRT's objects may throw whatever they like
        return fail("an exception of unknown type");
    }
}

void expect_counts(Op const& op, int32_t inputs, int32_t outputs) {
    auto const most = static_cast<int32_t>(op.inputs.size()), made = static_cast<int32_t>(op.outputs.size());
    if (inputs >= op.required && inputs <= most && outputs == made) return;
    std::string const optional = op.required == most ? "" : std::to_string(op.required) + " to ";
    throw std::invalid_argument(std::string(op.name) + " has " + optional + std::to_string(most) + " inputs and " +
                                std::to_string(made) + " outputs, found " + std::to_string(inputs) + " and " +
                                std::to_string(outputs));
}

// The kernels' API has recorded what is wrong, and the first record is kept.
void expect_success(Op const& op, TrtNvfp4Status status) {
    if (status == TRT_NVFP4_SUCCESS) return;
    throw std::invalid_argument(std::string(op.name) + ": no kernel serves these shapes and attributes");
}

bool is_activation_type(DataType t) { return t == DataType::kFLOAT || t == DataType::kHALF || t == DataType::kBF16; }

bool is_length_type(DataType t) { return t == DataType::kINT32 || t == DataType::kINT64; }

// The first input of a role that leaves a choice of types: the others have its type.
int32_t first_of(Op const& op, Role role) {
    auto const found = std::find_if(op.inputs.begin(), op.inputs.end(), [&](Port const& p) { return p.role == role; });
    return static_cast<int32_t>(found - op.inputs.begin());
}

// The type of a port; `type_at(i)` is input i's, of `inputs`.
template <typename TypeAt>
DataType type_of(Op const& op, Role role, int32_t inputs, TypeAt type_at) {
    switch (role) {
        case Role::kBytes:
            return DataType::kINT8;
        case Role::kFloat:
            return DataType::kFLOAT;
        case Role::kT:
            break;
        case Role::kCache:
        case Role::kLength:
        case Role::kState:
            if (first_of(op, role) < inputs) return type_at(first_of(op, role));
    }
    return type_at(0);
}

// Whether the types that the port's own type follows from are such as the op takes.
template <typename TypeAt>
bool is_choice(Op const& op, Role role, int32_t inputs, TypeAt type_at) {
    DataType const t = type_at(0);
    if (!is_activation_type(t)) return false;
    if (role == Role::kState) return is_activation_type(type_of(op, role, inputs, type_at));
    if (role == Role::kLength) return is_length_type(type_at(first_of(op, role)));
    if (role != Role::kCache) return true;
    DataType const cache = type_at(first_of(op, role));
    return cache == t || cache == DataType::kINT8;
}

// The rules of the op's Python definition.
void check_range(Op const& op, Attribute const& attribute) {
    std::string const what = std::string(op.name) + ": attribute " + attribute.name;
    if (attribute.is_float) {
        if (std::isfinite(attribute.real) && attribute.real >= 0) return;
        throw std::invalid_argument(what + " must be finite and not negative, it is " + std::to_string(attribute.real));
    }
    if (attribute.integer >= attribute.smallest && attribute.integer <= attribute.largest) return;
    throw std::invalid_argument(what + " must be " + std::to_string(attribute.smallest) + " to " +
                                std::to_string(attribute.largest) + ", it is " + std::to_string(attribute.integer));
}

void read_string(Op const& op, PluginField const& field, Attribute& attribute) {
    bool const given = field.type == PluginFieldType::kCHAR && field.data != nullptr && field.length >= 0;
    // TensorRT's parser counts no closing zero.
    std::string const found = given ? std::string(static_cast<char const*>(field.data), field.length).c_str() : "";
    auto const place = std::find(attribute.choices.begin(), attribute.choices.end(), found);
    if (place != attribute.choices.end()) {
        attribute.integer = static_cast<int32_t>(place - attribute.choices.begin());
        return;
    }
    std::string known;
    for (std::string const& choice : attribute.choices) known += (known.empty() ? "" : ", ") + choice;
    throw std::invalid_argument(std::string(op.name) + ": attribute " + attribute.name + " must be one of " + known +
                                ", it is " + (given ? "\"" + found + "\"" : "no string"));
}

void read_field(Op const& op, PluginField const& field, std::vector<Attribute>& attributes) {
    for (Attribute& attribute : attributes) {
        if (std::strcmp(field.name, attribute.name) != 0) continue;
        if (attribute.is_string()) return read_string(op, field, attribute);
        PluginFieldType const expected = attribute.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
        if (field.type != expected || field.length != 1 || field.data == nullptr) {
            throw std::invalid_argument(std::string(op.name) + ": attribute " + field.name + " must be one " +
                                        (attribute.is_float ? "FLOAT" : "INT") + ", it is " +
                                        std::to_string(field.length) + " of TensorRT's field type " +
                                        std::to_string(static_cast<int>(field.type)));
        }
        void* const target = attribute.is_float ? static_cast<void*>(&attribute.real) : &attribute.integer;
        std::memcpy(target, field.data, 4);
        check_range(op, attribute);
        return;
    }
    std::string known;
    for (Attribute const& attribute : attributes) known += (known.empty() ? "" : ", ") + std::string(attribute.name);
    throw std::invalid_argument(std::string(op.name) + " has no attribute " + field.name + "; it has " + known +
                                ". A model rewritten by another version of trt_nvfp4 has to be rewritten");
}

std::vector<Attribute> read_fields(Op const& op, nvinfer1::PluginFieldCollection const& fields) {
    std::vector<Attribute> attributes = op.attributes;
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        if (std::strcmp(fields.fields[i].name, kWorkspaceField) != 0) read_field(op, fields.fields[i], attributes);
    }
    return attributes;
}

std::string describe(Op const& op, std::vector<Attribute> const& attributes) {
    std::string text = std::string(op.name) + " version=" + kVersion;
    for (Attribute const& attribute : attributes) {
        char value[32];  // nine digits tell any two floats apart
        attribute.is_float ? std::snprintf(value, sizeof(value), "%.9g", attribute.real)
                           : std::snprintf(value, sizeof(value), "%d", attribute.integer);
        text += std::string(" ") + attribute.name + "=" + (attribute.is_string() ? attribute.choice() : value);
    }
    return text;
}

std::vector<PluginField> fields_of(std::vector<Attribute> const& attributes) {
    std::vector<PluginField> fields;
    for (Attribute const& attribute : attributes) {
        if (attribute.is_string()) {
            auto const length = static_cast<int32_t>(attribute.choice().size());
            fields.emplace_back(attribute.name, attribute.choice().data(), PluginFieldType::kCHAR, length);
        } else if (attribute.is_float) {
            fields.emplace_back(attribute.name, &attribute.real, PluginFieldType::kFLOAT32, 1);
        } else {
            fields.emplace_back(attribute.name, &attribute.integer, PluginFieldType::kINT32, 1);
        }
    }
    return fields;
}

// A profile's smallest or largest shapes: `end` is min or max, which repeat the shape where there is no choice.
std::vector<nvinfer1::PluginTensorDesc> shapes_at(nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::* end,
                                                  nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count) {
    std::vector<nvinfer1::PluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i) {
        descs.push_back(tensors[i].desc);
        descs.back().dims = tensors[i].*end;
    }
    return descs;
}

bool contains(TrtNvfp4Tactic const* tactics, int32_t count, TrtNvfp4Tactic tactic) {
    return std::find(tactics, tactics + count, tactic) != tactics + count;
}

// TensorRT times each tactic at one number of tokens and then uses the fastest for the whole profile. That pays where
// AUTO takes the same kernel at both ends of the profile and others might beat it; elsewhere no fixed one equals AUTO.
std::vector<int32_t> worth_timing(TrtNvfp4Tactics const& few, TrtNvfp4Tactics const& many) {
    if (few.list[0] != many.list[0]) return {};
    std::vector<int32_t> tactics;
    for (int32_t i = 0; i < many.sensible; ++i) {
        if (contains(few.list, few.sensible, many.list[i])) tactics.push_back(many.list[i]);
    }
    return tactics.size() > 1 ? tactics : std::vector<int32_t>{};
}

}  // namespace

Plugin::Plugin(Op const& op, nvinfer1::PluginFieldCollection const& fields)
    : op_(op), attributes_(read_fields(op, fields)), description_(describe(op, attributes_)) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        PluginField const& field = fields.fields[i];
        if (std::strcmp(field.name, kWorkspaceField) == 0 && field.type == PluginFieldType::kINT32) {
            *asked_kib_ = *static_cast<int32_t const*>(field.data);
        }
    }
    show_tactic(tactic_);
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE:
            return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD:
            return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME:
            return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

Plugin* Plugin::clone() noexcept {
    return guard([&] { return new Plugin(*this); }, static_cast<Plugin*>(nullptr));
}

char const* Plugin::getPluginVersion() const noexcept { return kVersion; }
char const* Plugin::getPluginNamespace() const noexcept { return kNamespace; }

int32_t Plugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                nvinfer1::DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept {
    return guard(
        [&] {
            expect_counts(op_, nbInputs, nbOutputs);
            using Desc = nvinfer1::DynamicPluginTensorDesc;
            auto const largest = shapes_at(&Desc::max, in, nbInputs);
            // Checks the shapes here, where a failure stops the build.
            workspace_size(largest.data(), nbInputs);
            offered_ = worth_timing(tactics(shapes_at(&Desc::min, in, nbInputs).data(), nbInputs),
                                    tactics(largest.data(), nbInputs));
            return 0;
        },
        -1);
}

int32_t Plugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                   int32_t nbInputs) const noexcept {
    return guard(
        [&] {
            expect_counts(op_, nbInputs, nbOutputs);
            auto const type_at = [&](int32_t input) { return inputTypes[input]; };
            for (int32_t i = 0; i < nbOutputs; ++i) {
                outputTypes[i] = type_of(op_, op_.outputs[i].role, nbInputs, type_at);
            }
            return 0;
        },
        -1);
}

int32_t Plugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*,
                                int32_t, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                                nvinfer1::IExprBuilder& exprBuilder) noexcept {
    return guard(
        [&] {
            expect_counts(op_, nbInputs, nbOutputs);
            if (inputs[0].nbDims < 1) throw std::invalid_argument(std::string(op_.name) + ": x has no dimension");
            op_.output_shapes(ShapeRule{op_, attributes_, nbInputs, inputs, exprBuilder}, outputs);
            return 0;
        },
        -1);
}

bool Plugin::supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                       int32_t nbOutputs) noexcept {
    return guard(
        [&] {
            expect_counts(op_, nbInputs, nbOutputs);
            nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
            Role const role = pos < nbInputs ? op_.inputs[pos].role : op_.outputs[pos - nbInputs].role;
            auto const type_at = [&](int32_t input) { return inOut[input].desc.type; };
            return desc.format == nvinfer1::TensorFormat::kLINEAR && is_choice(op_, role, nbInputs, type_at) &&
                   desc.type == type_of(op_, role, nbInputs, type_at);
        },
        false);
}

size_t Plugin::getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                nvinfer1::DynamicPluginTensorDesc const*, int32_t) const noexcept {
    auto const max = &nvinfer1::DynamicPluginTensorDesc::max;
    return guard(
        [&] {
            size_t const bytes = workspace_size(shapes_at(max, in, nbInputs).data(), nbInputs);
            *asked_kib_ = std::max(asked_kib_->load(), static_cast<int32_t>((bytes + 1023) / 1024));
            return bytes;
        },
        size_t{0});
}

int32_t Plugin::getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept {
    if (nbTactics != getNbTactics()) return -1;
    std::copy(offered_.begin(), offered_.end(), tactics);
    return 0;
}

int32_t Plugin::setTactic(int32_t tactic) noexcept {
    return guard(
        [&] {
            tactic_ = static_cast<TrtNvfp4Tactic>(tactic);
            show_tactic(tactic_);
            return 0;
        },
        -1);
}

int32_t Plugin::onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*,
                              int32_t nbOutputs) noexcept {
    return guard(
        [&] {
            expect_counts(op_, nbInputs, nbOutputs);
            workspace_size(in, nbInputs);
            input_count_ = nbInputs;
            return 0;
        },
        -1);
}

int32_t Plugin::enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*,
                        void const* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
    return guard(
        [&] {
            TrtNvfp4Tactic tactic = tactic_;
            if (tactic != TRT_NVFP4_TACTIC_AUTO) {
                TrtNvfp4Tactics const serving = tactics(inputDesc, input_count_);
                if (!contains(serving.list, serving.count, tactic)) tactic = TRT_NVFP4_TACTIC_AUTO;
                show_tactic(tactic);
            }
            Call const call{op_, attributes_, tactic, input_count_, inputDesc, inputs, outputs};
            size_t const asked = size_t{1024} * asked_kib_->load();
            return static_cast<int32_t>(
                op_.kernels.run(call, workspace, asked > 0 ? asked : workspace_size(inputDesc, input_count_), stream));
        },
        -1);
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

nvinfer1::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept {
    return guard(
        [&]() -> nvinfer1::PluginFieldCollection const* {
            fields_ = fields_of(attributes_);
            serialized_kib_ = *asked_kib_;
            fields_.emplace_back(kWorkspaceField, &serialized_kib_, PluginFieldType::kINT32, 1);
            field_collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
            return &field_collection_;
        },
        static_cast<nvinfer1::PluginFieldCollection const*>(nullptr));
}

size_t Plugin::workspace_size(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const {
    auto const of = [&](TrtNvfp4Tactic tactic) {
        size_t bytes = 0;
        expect_success(op_, op_.kernels.workspace({op_, attributes_, tactic, count, inputs, nullptr, nullptr}, &bytes));
        return bytes;
    };
    size_t const most = of(TRT_NVFP4_TACTIC_AUTO);
    return tactic_ == TRT_NVFP4_TACTIC_AUTO ? most : std::max(most, of(tactic_));
}

TrtNvfp4Tactics Plugin::tactics(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const {
    TrtNvfp4Tactics found{};
    expect_success(op_, op_.kernels.tactics({op_, attributes_, tactic_, count, inputs, nullptr, nullptr}, &found));
    return found;
}

void Plugin::show_tactic(TrtNvfp4Tactic tactic) {
    if (tactic == shown_ && !metadata_.empty()) return;
    shown_ = tactic;
    metadata_ = description_ + " tactic=" + std::to_string(static_cast<int>(tactic));
}

PluginCreator::PluginCreator(Op const& op) : op_(op), fields_(fields_of(op.attributes)) {
    field_collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* PluginCreator::createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields,
                                                 nvinfer1::TensorRTPhase) noexcept {
    return guard(
        [&]() -> nvinfer1::IPluginV3* {
            if (fields == nullptr) throw std::invalid_argument(std::string(op_.name) + ": no attributes were given");
            return new Plugin(op_, *fields);
        },
        static_cast<nvinfer1::IPluginV3*>(nullptr));
}

char const* PluginCreator::getPluginVersion() const noexcept { return kVersion; }
char const* PluginCreator::getPluginNamespace() const noexcept { return kNamespace; }

}  // namespace trt_nvfp4
