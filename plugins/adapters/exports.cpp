// The two symbols that TensorRT's registry asks a plugin library for. This protocol is the same in all versions; who
// merely opens the library is served by self_registration.cpp.
#include <memory>

#include "plugin.h"

#define TRT_NVFP4_EXPORT __attribute__((visibility("default")))

namespace trt_nvfp4 {
namespace {

struct Creators {
    template <typename... Ops>
    explicit Creators(OpList<Ops...>) {
        (made.push_back(std::make_unique<PluginCreator>(adapter<Ops>())), ...);
        for (auto const& creator : made) pointers.push_back(creator.get());
    }

    std::vector<std::unique_ptr<PluginCreator>> made;
    std::vector<nvinfer1::IPluginCreatorInterface*> pointers;
};

}  // namespace
}  // namespace trt_nvfp4

extern "C" {

TRT_NVFP4_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static trt_nvfp4::Creators const creators{trt_nvfp4::AllOps{}};
    count = static_cast<int32_t>(creators.pointers.size());
    return creators.pointers.data();
}

// The finder is not kept: ILogger's virtual order differs between TensorRT 10 and 11, so one binary cannot call it for
// both. Errors are read through trtNvfp4LastError.
TRT_NVFP4_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

}  // extern "C"
