// Prints the binary interface that plugins meet: sizes, offsets, enum values, virtual table slots. Compiled with
// TensorRT's headers and with the project's declaration, it must print the same.
#include <cstddef>
#include <cstdio>
#include <cstring>

#ifdef TRT_NVFP4_TENSORRT_HEADERS
#include <NvInferRuntime.h>
#else
#include "NvInferPluginV3.h"
#endif

using namespace nvinfer1;

// Itanium C++ ABI 2.3: a pointer to a virtual member function holds 1 plus the offset of its virtual table slot.
template <typename F>
long slot(F f) {
    std::ptrdiff_t words[2];
    static_assert(sizeof(f) == sizeof(words), "Itanium C++ ABI");
    std::memcpy(words, &f, sizeof(words));
    return (words[0] - 1) / static_cast<long>(sizeof(void*));
}

#define SIZE(type) std::printf("size " #type " %zu align %zu\n", sizeof(type), alignof(type))
#define OFFSET(type, member) std::printf("offset " #type "::" #member " %zu\n", offsetof(type, member))
#define VALUE(value) std::printf("value " #value " %ld\n", static_cast<long>(value))
#define SLOT(type, method) std::printf("slot " #type "::" #method " %ld\n", slot(&type::method))

struct Core : IPluginV3OneCore {
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};
struct Build : IPluginV3OneBuild {
    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) noexcept override {
        return 0;
    }
    int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t) const noexcept override { return 0; }
    int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*, int32_t,
                            IExprBuilder&) noexcept override {
        return 0;
    }
    bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept override {
        return false;
    }
    int32_t getNbOutputs() const noexcept override { return 0; }
};
struct Runtime : IPluginV3OneRuntime {
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                    cudaStream_t) noexcept override {
        return 0;
    }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return nullptr; }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return nullptr; }
};
struct Whole : IPluginV3 {
    IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept override { return nullptr; }
    IPluginV3* clone() noexcept override { return nullptr; }
};
struct Creator : IPluginCreatorV3One {
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const*, TensorRTPhase) noexcept override {
        return nullptr;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return nullptr; }
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};

void print_info(IVersionedInterface const& interface) {
    InterfaceInfo const info = interface.getInterfaceInfo();
    std::printf("interface %s %d.%d language %d\n", info.kind, info.major, info.minor,
                static_cast<int>(interface.getAPILanguage()));
}

int main() {
    SIZE(Dims);
    OFFSET(Dims, nbDims);
    OFFSET(Dims, d);
    SIZE(PluginTensorDesc);
    OFFSET(PluginTensorDesc, dims);
    OFFSET(PluginTensorDesc, type);
    OFFSET(PluginTensorDesc, format);
    OFFSET(PluginTensorDesc, scale);
    SIZE(DynamicPluginTensorDesc);
    OFFSET(DynamicPluginTensorDesc, desc);
    OFFSET(DynamicPluginTensorDesc, min);
    OFFSET(DynamicPluginTensorDesc, max);
    OFFSET(DynamicPluginTensorDesc, opt);
    SIZE(PluginField);
    OFFSET(PluginField, name);
    OFFSET(PluginField, data);
    OFFSET(PluginField, type);
    OFFSET(PluginField, length);
    SIZE(PluginFieldCollection);
    OFFSET(PluginFieldCollection, nbFields);
    OFFSET(PluginFieldCollection, fields);
    SIZE(InterfaceInfo);
    OFFSET(InterfaceInfo, kind);
    OFFSET(InterfaceInfo, major);
    OFFSET(InterfaceInfo, minor);
    SIZE(DimsExprs);
    OFFSET(DimsExprs, nbDims);
    OFFSET(DimsExprs, d);
    SIZE(IDimensionExpr);
    SIZE(IExprBuilder);
    SIZE(IPluginV3OneBuild);

    VALUE(DataType::kFLOAT);
    VALUE(DataType::kHALF);
    VALUE(DataType::kINT8);
    VALUE(DataType::kINT32);
    VALUE(DataType::kBOOL);
    VALUE(DataType::kUINT8);
    VALUE(DataType::kFP8);
    VALUE(DataType::kBF16);
    VALUE(DataType::kINT64);
    VALUE(DataType::kINT4);
    VALUE(DataType::kFP4);
    VALUE(DataType::kE8M0);
    VALUE(TensorFormat::kLINEAR);
    VALUE(TensorRTPhase::kBUILD);
    VALUE(TensorRTPhase::kRUNTIME);
    VALUE(PluginCapabilityType::kCORE);
    VALUE(PluginCapabilityType::kBUILD);
    VALUE(PluginCapabilityType::kRUNTIME);
    VALUE(PluginFieldType::kFLOAT16);
    VALUE(PluginFieldType::kFLOAT32);
    VALUE(PluginFieldType::kFLOAT64);
    VALUE(PluginFieldType::kINT8);
    VALUE(PluginFieldType::kINT16);
    VALUE(PluginFieldType::kINT32);
    VALUE(PluginFieldType::kCHAR);
    VALUE(PluginFieldType::kDIMS);
    VALUE(PluginFieldType::kUNKNOWN);
    VALUE(PluginFieldType::kBF16);
    VALUE(PluginFieldType::kINT64);
    VALUE(PluginFieldType::kFP8);
    VALUE(PluginFieldType::kINT4);
    VALUE(PluginFieldType::kFP4);
    VALUE(DimensionOperation::kSUM);
    VALUE(DimensionOperation::kPROD);
    VALUE(DimensionOperation::kMAX);
    VALUE(DimensionOperation::kMIN);
    VALUE(DimensionOperation::kSUB);
    VALUE(DimensionOperation::kEQUAL);
    VALUE(DimensionOperation::kLESS);
    VALUE(DimensionOperation::kFLOOR_DIV);
    VALUE(DimensionOperation::kCEIL_DIV);
    VALUE(APILanguage::kCPP);
    VALUE(APILanguage::kPYTHON);
    VALUE(IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT);

    SLOT(IVersionedInterface, getAPILanguage);
    SLOT(IVersionedInterface, getInterfaceInfo);
    SLOT(IPluginV3, getCapabilityInterface);
    SLOT(IPluginV3, clone);
    SLOT(IPluginV3OneCore, getPluginName);
    SLOT(IPluginV3OneCore, getPluginVersion);
    SLOT(IPluginV3OneCore, getPluginNamespace);
    SLOT(IPluginV3OneBuild, configurePlugin);
    SLOT(IPluginV3OneBuild, getOutputDataTypes);
    SLOT(IPluginV3OneBuild, getOutputShapes);
    SLOT(IPluginV3OneBuild, supportsFormatCombination);
    SLOT(IPluginV3OneBuild, getNbOutputs);
    SLOT(IPluginV3OneBuild, getWorkspaceSize);
    SLOT(IPluginV3OneBuild, getValidTactics);
    SLOT(IPluginV3OneBuild, getNbTactics);
    SLOT(IPluginV3OneBuild, getTimingCacheID);
    SLOT(IPluginV3OneBuild, getFormatCombinationLimit);
    SLOT(IPluginV3OneBuild, getMetadataString);
    SLOT(IPluginV3OneRuntime, setTactic);
    SLOT(IPluginV3OneRuntime, onShapeChange);
    SLOT(IPluginV3OneRuntime, enqueue);
    SLOT(IPluginV3OneRuntime, attachToContext);
    SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
    SLOT(IPluginCreatorV3One, createPlugin);
    SLOT(IPluginCreatorV3One, getFieldNames);
    SLOT(IPluginCreatorV3One, getPluginName);
    SLOT(IPluginCreatorV3One, getPluginVersion);
    SLOT(IPluginCreatorV3One, getPluginNamespace);
    SLOT(apiv::VDimensionExpr, isConstant);
    SLOT(apiv::VDimensionExpr, getConstantValue);
    SLOT(apiv::VDimensionExpr, isSizeTensor);
    SLOT(apiv::VExprBuilder, constant);
    SLOT(apiv::VExprBuilder, operation);
    SLOT(apiv::VExprBuilder, declareSizeTensor);

    print_info(Whole{});
    print_info(Core{});
    print_info(Build{});
    print_info(Runtime{});
    print_info(Creator{});
}
