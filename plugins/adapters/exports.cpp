// The two symbols that TensorRT's registry asks a plugin library for. This protocol is the same in all versions; who
// merely opens the library is served by self_registration.cpp.
#include "plugin.h"

#define TRT_NVFP4_EXPORT __attribute__((visibility("default")))

extern "C" {

TRT_NVFP4_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static trt_nvfp4::PluginCreator linear(trt_nvfp4::linear_op());
    static trt_nvfp4::PluginCreator gated_mlp(trt_nvfp4::gated_mlp_op());
    static trt_nvfp4::PluginCreator persistent_mlp(trt_nvfp4::persistent_mlp_op());
    static trt_nvfp4::PluginCreator moe(trt_nvfp4::moe_op());
    static trt_nvfp4::PluginCreator fp8_gated_mlp(trt_nvfp4::fp8_gated_mlp_op());
    static trt_nvfp4::PluginCreator fp8_moe(trt_nvfp4::fp8_moe_op());
    static trt_nvfp4::PluginCreator quantize(trt_nvfp4::quantize_op());
    static trt_nvfp4::PluginCreator attention(trt_nvfp4::cached_attention_op());
    static trt_nvfp4::PluginCreator decoder(trt_nvfp4::decoder_op());
    static nvinfer1::IPluginCreatorInterface* const creators[] = {
        &linear, &gated_mlp, &persistent_mlp, &moe, &fp8_moe, &fp8_gated_mlp, &quantize, &attention, &decoder};
    count = static_cast<int32_t>(sizeof(creators) / sizeof(creators[0]));
    return creators;
}

// The finder is not kept: ILogger's virtual order differs between TensorRT 10 and 11, so one binary cannot call it for
// both. Errors are read through trtNvfp4LastError.
TRT_NVFP4_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

}  // extern "C"
