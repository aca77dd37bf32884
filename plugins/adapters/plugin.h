// IPluginV3 over an Op: every TensorRT-facing rule that the ops share.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "op.h"

namespace trt_nvfp4 {

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
    // Throws std::invalid_argument for a field that the op does not have or of the wrong type. An absent field has the
    // op's default.
    Plugin(Op const& op, nvinfer1::PluginFieldCollection const& fields);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    Plugin* clone() noexcept override;

    char const* getPluginName() const noexcept override { return op_.name; }
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                            nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                               int32_t nbInputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                            int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                            nvinfer1::IExprBuilder& exprBuilder) noexcept override;
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                   int32_t nbOutputs) noexcept override;
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(op_.outputs.size()); }
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                            nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) const noexcept override;
    char const* getTimingCacheID() noexcept override { return description_.c_str(); }
    // The attributes, and the tactic that was set, or 0 after an enqueue in which AUTO stood in for it.
    char const* getMetadataString() noexcept override { return metadata_.c_str(); }

    // The tactics that TensorRT is to time for the configured shapes; none: AUTO (TensorRT's 0) decides at each
    // enqueue.
    int32_t getNbTactics() noexcept override { return static_cast<int32_t>(offered_.size()); }
    int32_t getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept override;
    // TensorRT keeps the fastest in the engine and sets it again at run time. Where it cannot serve an enqueue's shapes
    // AUTO does instead.
    int32_t setTactic(int32_t tactic) noexcept override;
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                          int32_t nbOutputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
    // What AUTO and the tactic that is set need.
    size_t workspace_size(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const;
    TrtNvfp4Tactics tactics(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const;
    void show_tactic(TrtNvfp4Tactic tactic);

    Op const& op_;
    std::vector<Attribute> attributes_;
    TrtNvfp4Tactic tactic_ = TRT_NVFP4_TACTIC_AUTO;
    TrtNvfp4Tactic shown_ = TRT_NVFP4_TACTIC_AUTO;
    int32_t input_count_ = 0;  // at the last change of shapes; enqueue is not given it
    std::vector<int32_t> offered_;
    std::string description_, metadata_;
    // The most workspace, in KiB, that this plugin and its clones requested: what TensorRT gives an enqueue.
    // It goes into the engine; 0: not known.
    std::shared_ptr<std::atomic<int32_t>> asked_kib_ = std::make_shared<std::atomic<int32_t>>(0);
    int32_t serialized_kib_ = 0;
    // Point into attributes_, valid until the next call.
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection field_collection_{};
};

class PluginCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
    explicit PluginCreator(Op const& op);

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &field_collection_; }
    char const* getPluginName() const noexcept override { return op_.name; }
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

 private:
    Op const& op_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection field_collection_{};
};

}  // namespace trt_nvfp4
