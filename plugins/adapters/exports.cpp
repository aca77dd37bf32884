// The symbols that TensorRT's registry asks a plugin library for. This protocol is the same in all versions; who
// merely opens the library is served by self_registration.cpp.
#include <memory>

#include "plugin.h"
#if __has_include("linked_kernels.h")
#include "linked_kernels.h"
#else  // all of them
namespace trt_nvfp4 {
using LinkedOps = AllOps;
constexpr char kLinkedKernels[] = "all";
}  // namespace trt_nvfp4
#endif

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
    static trt_nvfp4::Creators const creators{trt_nvfp4::LinkedOps{}};
    count = static_cast<int32_t>(creators.pointers.size());
    return creators.pointers.data();
}

// The finder is not kept: ILogger's virtual order differs between TensorRT 10 and 11, so one binary cannot call it for
// both. Errors are read through trtNvfp4LastError.
TRT_NVFP4_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

// Names of the groups of kernels in this library (plugins/compile/kernel_groups.py), with spaces between them.
TRT_NVFP4_EXPORT char const* trtNvfp4LinkedKernels() { return trt_nvfp4::kLinkedKernels; }

}  // extern "C"
