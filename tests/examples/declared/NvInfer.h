// The part of TensorRT's runtime interface that the C++ examples call, declared anew to compile them where its headers
// are not: nothing links with it, as TensorRT's classes are laid out otherwise.
// Specification: TensorRT API reference, NvInferRuntime.h and NvInferRuntimeBase.h.
#pragma once

#include "../../../plugins/interface/NvInferPluginV3.h"

namespace nvinfer1 {

enum class TensorIOMode : int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };
enum class OptProfileSelector : int32_t { kMIN = 0, kOPT = 1, kMAX = 2 };

class Dims2 : public Dims {
 public:
    Dims2(int64_t d0, int64_t d1) : Dims{2, {d0, d1}} {}
};

class ILogger {
 public:
    enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };
    virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
    virtual ~ILogger() = default;
};

class IPluginRegistry {
 public:
    virtual void* loadLibrary(AsciiChar const* pluginPath) noexcept = 0;
    virtual ~IPluginRegistry() noexcept = default;
};

class IExecutionContext : public INoCopy {
 public:
    ~IExecutionContext() noexcept override;
    bool setInputShape(char const* tensorName, Dims const& dims) noexcept;
    Dims getTensorShape(char const* tensorName) const noexcept;
    bool setTensorAddress(char const* tensorName, void* data) noexcept;
    bool setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept;
    bool enqueueV3(cudaStream_t stream) noexcept;
};

class ICudaEngine : public INoCopy {
 public:
    ~ICudaEngine() noexcept override;
    char const* getName() const noexcept;
    int32_t getNbIOTensors() const noexcept;
    char const* getIOTensorName(int32_t index) const noexcept;
    TensorIOMode getTensorIOMode(char const* tensorName) const noexcept;
    DataType getTensorDataType(char const* tensorName) const noexcept;
    Dims getTensorShape(char const* tensorName) const noexcept;
    int32_t getNbOptimizationProfiles() const noexcept;
    Dims getProfileShape(char const* tensorName, int32_t profileIndex, OptProfileSelector select) const noexcept;
    IExecutionContext* createExecutionContext() noexcept;
};

class IRuntime : public INoCopy {
 public:
    ~IRuntime() noexcept override;
    ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept;
    IPluginRegistry& getPluginRegistry() noexcept;
    void setEngineHostCodeAllowed(bool allowed) noexcept;
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

}  // namespace nvinfer1
