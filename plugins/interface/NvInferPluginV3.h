// The part of TensorRT's C++ interface that a version 3 plugin and its creator meet, declared anew: TensorRT's headers
// come in no registry package. These interfaces are versioned and frozen at 1.0 in TensorRT 10.2 to 11.x and
// TensorRT-RTX 1.x; names, values, member order and virtual order below are the binary interface and may not change.
// Specification: TensorRT API reference, NvInferRuntimeBase.h, NvInferPluginBase.h, NvInferRuntime.h.
#pragma once

#include <cstddef>
#include <cstdint>

using cudaStream_t = struct CUstream_st*;

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t {
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8,
    kINT4 = 9,
    kFP4 = 10,
    kE8M0 = 11,
};

enum class TensorFormat : int32_t { kLINEAR = 0 };

enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };

enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

enum class PluginFieldType : int32_t {
    kFLOAT16 = 0,
    kFLOAT32 = 1,
    kFLOAT64 = 2,
    kINT8 = 3,
    kINT16 = 4,
    kINT32 = 5,
    kCHAR = 6,
    kDIMS = 7,
    kUNKNOWN = 8,
    kBF16 = 9,
    kINT64 = 10,
    kFP8 = 11,
    kINT4 = 12,
    kFP4 = 13,
};

enum class DimensionOperation : int32_t {
    kSUM = 0,
    kPROD = 1,
    kMAX = 2,
    kMIN = 3,
    kSUB = 4,
    kEQUAL = 5,
    kLESS = 6,
    kFLOOR_DIV = 7,
    kCEIL_DIV = 8,
};

class Dims64 {
 public:
    static constexpr int32_t MAX_DIMS{8};
    int32_t nbDims;
    int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
    Dims opt;
};

class PluginField {
 public:
    AsciiChar const* name;
    void const* data;
    PluginFieldType type;
    int32_t length;

    PluginField(AsciiChar const* name_ = nullptr, void const* data_ = nullptr,
                PluginFieldType type_ = PluginFieldType::kUNKNOWN, int32_t length_ = 0) noexcept
        : name(name_), data(data_), type(type_), length(length_) {}
};

struct PluginFieldCollection {
    int32_t nbFields{};
    PluginField const* fields{};
};

class InterfaceInfo {
 public:
    char const* kind;
    int32_t major;
    int32_t minor;
};

class IVersionedInterface {
 public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

// Symbolic dimensions: thin classes over implementations that live in TensorRT (or in the plugin host).
class IDimensionExpr;

namespace apiv {

class VRoot {
 public:
    virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
 public:
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
 public:
    virtual IDimensionExpr const* constant(int64_t value) = 0;
    virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                            IDimensionExpr const& second) = 0;
    virtual IDimensionExpr const* declareSizeTensor(int32_t outputIndex, IDimensionExpr const& opt,
                                                    IDimensionExpr const& upper) = 0;
};

}  // namespace apiv

class INoCopy {
 public:
    INoCopy(INoCopy const&) = delete;
    INoCopy& operator=(INoCopy const&) = delete;

 protected:
    INoCopy() = default;
    virtual ~INoCopy() = default;
};

class IDimensionExpr : public INoCopy {
 public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

 protected:
    apiv::VDimensionExpr* mImpl;
    ~IDimensionExpr() noexcept override = default;
};

class IExprBuilder : public INoCopy {
 public:
    IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                    IDimensionExpr const& second) noexcept {
        return mImpl->operation(op, first, second);
    }

 protected:
    apiv::VExprBuilder* mImpl;
    ~IExprBuilder() noexcept override = default;
};

class DimsExprs {
 public:
    int32_t nbDims;
    IDimensionExpr const* d[Dims::MAX_DIMS];
};

class IPluginResourceContext;

// The namespace is part of the mangled names, hence of the interface.
namespace v_1_0 {

class ILoggerFinder;

class IPluginCapability : public IVersionedInterface {};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
    static constexpr int32_t kDEFAULT_FORMAT_COMBINATION_LIMIT = 100;
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                    DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                       int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
                                    int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs,
                                    IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                           int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                    int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return kDEFAULT_FORMAT_COMBINATION_LIMIT; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out,
                                  int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                            void const* const* inputs, void* const* outputs, void* workspace,
                            cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fc,
                                    TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

using v_1_0::ILoggerFinder;
using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;

}  // namespace nvinfer1
