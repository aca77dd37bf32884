// Loads a plugin library as TensorRT does and prints the plugins it offers, a line each.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

#include "NvInferPluginV3.h"

int main(int, char** arguments) {
    void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
    auto const get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    int32_t count = 0;
    auto* const* const creators = get_creators(count);
    for (int32_t i = 0; i < count; ++i) {
        auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
        std::printf("%s::%s %s\n", creator->getPluginNamespace(), creator->getPluginName(),
                    creator->getPluginVersion());
    }
    return 0;
}
