// Drives a plugin library through its life as TensorRT would, without TensorRT: one C function per call, used by
// host.py through ctypes. Needs no CUDA to build; device pointers and streams only pass through.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "dimension_expr.h"

namespace {

using namespace nvinfer1;

thread_local std::string host_error;

// Reports `message` through hostError and returns a failure value.
template <typename T>
T fail(std::string const& message, T failure) {
    host_error = message;
    return failure;
}

struct Library {
    void* handle;
    IPluginCreatorInterface* const* creators;
    int32_t creator_count;
    char const* (*last_error)();
};

struct Plugin {
    IPluginV3* plugin;
    IPluginV3OneBuild* build;
    IPluginV3OneRuntime* runtime;
};

bool is_version_one(IVersionedInterface const& interface, char const* kind) {
    InterfaceInfo const info = interface.getInterfaceInfo();
    return std::strcmp(info.kind, kind) == 0 && info.major == 1 && info.minor == 0;
}

IPluginCreatorV3One* find_creator(Library const& library, char const* op) {
    for (int32_t i = 0; i < library.creator_count; ++i) {
        if (!is_version_one(*library.creators[i], "PLUGIN CREATOR_V3ONE")) continue;
        auto* const creator = static_cast<IPluginCreatorV3One*>(library.creators[i]);
        if (std::strcmp(creator->getPluginName(), op) == 0) return creator;
    }
    return fail("the library has no creator for " + std::string(op), static_cast<IPluginCreatorV3One*>(nullptr));
}

Plugin* wrap(IPluginV3* plugin) {
    if (plugin == nullptr) return fail("the library returned no plugin", static_cast<Plugin*>(nullptr));
    IPluginCapability* const core = plugin->getCapabilityInterface(PluginCapabilityType::kCORE);
    IPluginCapability* const build = plugin->getCapabilityInterface(PluginCapabilityType::kBUILD);
    IPluginCapability* const runtime = plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME);
    bool const complete = core != nullptr && build != nullptr && runtime != nullptr &&
                          is_version_one(*plugin, "PLUGIN") && is_version_one(*core, "PLUGIN_V3ONE_CORE") &&
                          is_version_one(*build, "PLUGIN_V3ONE_BUILD") &&
                          is_version_one(*runtime, "PLUGIN_V3ONE_RUNTIME");
    if (!complete) {
        delete plugin;
        return fail("the plugin lacks a capability of version 1.0", static_cast<Plugin*>(nullptr));
    }
    return new Plugin{plugin, static_cast<IPluginV3OneBuild*>(build), static_cast<IPluginV3OneRuntime*>(runtime)};
}

int32_t copy_fields(PluginFieldCollection const* collection, PluginField* fields, int32_t capacity) {
    if (collection == nullptr) return fail("the library returned no fields", -1);
    for (int32_t i = 0; i < collection->nbFields && i < capacity; ++i) fields[i] = collection->fields[i];
    return collection->nbFields;
}

}  // namespace

extern "C" {

char const* hostError() { return host_error.c_str(); }

Library* hostOpen(char const* path) {
    void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return fail(dlerror(), static_cast<Library*>(nullptr));
    using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
    auto const get_creators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"));
    auto const set_logger_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"));
    auto const last_error = reinterpret_cast<char const* (*)()>(dlsym(handle, "trtNvfp4LastError"));
    if (get_creators == nullptr || set_logger_finder == nullptr || last_error == nullptr) {
        dlclose(handle);
        return fail(std::string(path) + " exports no getCreators, setLoggerFinder and trtNvfp4LastError",
                    static_cast<Library*>(nullptr));
    }
    set_logger_finder(nullptr);
    int32_t count = 0;
    IPluginCreatorInterface* const* const creators = get_creators(count);
    return new Library{handle, creators, count, last_error};
}

char const* hostLibraryError(Library* library) { return library->last_error(); }

int32_t hostCreatorCount(Library* library) { return library->creator_count; }

char const* hostCreatorName(Library* library, int32_t index) {
    return static_cast<IPluginCreatorV3One*>(library->creators[index])->getPluginName();
}

int32_t hostFieldNames(Library* library, char const* op, PluginField* fields, int32_t capacity) {
    IPluginCreatorV3One* const creator = find_creator(*library, op);
    return creator == nullptr ? -1 : copy_fields(creator->getFieldNames(), fields, capacity);
}

Plugin* hostCreate(Library* library, char const* op, PluginField const* fields, int32_t count, int32_t phase) {
    IPluginCreatorV3One* const creator = find_creator(*library, op);
    if (creator == nullptr) return nullptr;
    PluginFieldCollection const collection{count, fields};
    return wrap(creator->createPlugin("plugin_host", &collection, static_cast<TensorRTPhase>(phase)));
}

Plugin* hostClone(Plugin* plugin) { return wrap(plugin->plugin->clone()); }

Plugin* hostAttach(Plugin* plugin) { return wrap(plugin->runtime->attachToContext(nullptr)); }

void hostDestroy(Plugin* plugin) {
    delete plugin->plugin;
    delete plugin;
}

char const* hostTimingCacheId(Plugin* plugin) { return plugin->build->getTimingCacheID(); }
char const* hostMetadata(Plugin* plugin) { return plugin->build->getMetadataString(); }
int32_t hostOutputCount(Plugin* plugin) { return plugin->build->getNbOutputs(); }

int32_t hostOutputTypes(Plugin* plugin, DataType const* inputs, int32_t input_count, DataType* outputs,
                        int32_t output_count) {
    return plugin->build->getOutputDataTypes(outputs, output_count, inputs, input_count);
}

// `declared` holds -1 where the network leaves a dimension open: the plugin sees a symbol there, never `actual`'s
// value.
int32_t hostOutputShapes(Plugin* plugin, Dims const* declared, Dims const* actual, int32_t input_count, Dims* outputs,
                         int32_t output_count) {
    plugin_host::ExprBuilder builder;
    std::vector<DimsExprs> input_exprs(input_count);
    for (int32_t i = 0; i < input_count; ++i) {
        input_exprs[i].nbDims = declared[i].nbDims;
        for (int32_t d = 0; d < declared[i].nbDims; ++d) {
            input_exprs[i].d[d] = declared[i].d[d] < 0 ? builder.input(i, d) : builder.known(declared[i].d[d]);
        }
    }
    std::vector<DimsExprs> output_exprs(output_count);
    int32_t const status = plugin->build->getOutputShapes(input_exprs.data(), input_count, nullptr, 0,
                                                          output_exprs.data(), output_count, builder);
    if (status != 0) return status;
    for (int32_t i = 0; i < output_count; ++i) {
        outputs[i].nbDims = output_exprs[i].nbDims;
        for (int32_t d = 0; d < outputs[i].nbDims; ++d) {
            outputs[i].d[d] = static_cast<plugin_host::DimensionExpr const*>(output_exprs[i].d[d])->evaluate(actual);
        }
    }
    return 0;
}

int32_t hostSupportsFormat(Plugin* plugin, int32_t position, DynamicPluginTensorDesc const* tensors,
                           int32_t input_count, int32_t output_count) {
    return plugin->build->supportsFormatCombination(position, tensors, input_count, output_count) ? 1 : 0;
}

int32_t hostConfigure(Plugin* plugin, DynamicPluginTensorDesc const* tensors, int32_t input_count,
                      int32_t output_count) {
    return plugin->build->configurePlugin(tensors, input_count, tensors + input_count, output_count);
}

size_t hostWorkspaceSize(Plugin* plugin, DynamicPluginTensorDesc const* tensors, int32_t input_count,
                         int32_t output_count) {
    return plugin->build->getWorkspaceSize(tensors, input_count, tensors + input_count, output_count);
}

int32_t hostTactics(Plugin* plugin, int32_t* tactics, int32_t capacity) {
    int32_t const count = plugin->build->getNbTactics();
    if (count > capacity) return fail("more tactics than the host has room for", -1);
    if (count > 0 && plugin->build->getValidTactics(tactics, count) != 0) return fail("getValidTactics failed", -1);
    return count;
}

int32_t hostFieldsToSerialize(Plugin* plugin, PluginField* fields, int32_t capacity) {
    return copy_fields(plugin->runtime->getFieldsToSerialize(), fields, capacity);
}

int32_t hostSetTactic(Plugin* plugin, int32_t tactic) { return plugin->runtime->setTactic(tactic); }

int32_t hostOnShapeChange(Plugin* plugin, PluginTensorDesc const* tensors, int32_t input_count, int32_t output_count) {
    return plugin->runtime->onShapeChange(tensors, input_count, tensors + input_count, output_count);
}

int32_t hostEnqueue(Plugin* plugin, PluginTensorDesc const* tensors, int32_t input_count, void const* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) {
    return plugin->runtime->enqueue(tensors, tensors + input_count, inputs, outputs, workspace, stream);
}

}  // extern "C"
