// Registers the creators when the library is merely dlopened, as `polygraphy --plugins` and `trtexec --staticPlugins`
// do it. TensorRT's own loader (IPluginRegistry::loadLibrary, an engine that carries the library) asks for getCreators
// instead, and may unload the library later: then nothing is registered here.
#include <dlfcn.h>
#include <link.h>
#include <unwind.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "plugin.h"
#include "unversioned_name.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace trt_nvfp4 {
namespace {

// Where IPluginRegistry's table of virtual functions has those that are called here. They moved when the functions for
// version 2 plugins were removed.
struct Slots {
    int register_creator, get_creator;
};
constexpr Slots kWithVersion2{12, 14}, kWithoutVersion2{8, 10};

struct TensorRT {
    void* registry;
    void* module;  // where it is loaded
    Slots slots;
};

// `version` is major * 10000 + minor * 100 + patch: TensorRT's has six digits, TensorRT-RTX's five. False: a version
// whose table is not known.
bool find_slots(int32_t version, Slots& slots) {
    int32_t const major = version / 10000;
    if (major != 1 && major != 10 && major != 11) return false;
    slots = major == 10 || (major == 1 && version < 10500) ? kWithVersion2 : kWithoutVersion2;
    return true;
}

// The first is a handle of dlopen. False: the module is no TensorRT, or one whose version is not known.
bool find_registry(void* handle, TensorRT& found) {
    auto const registry = reinterpret_cast<void* (*)()>(dlsym(handle, "getPluginRegistry"));
    auto const version = reinterpret_cast<int32_t (*)()>(dlsym(handle, "getInferLibVersion"));
    Dl_info where;
    if (registry == nullptr || version == nullptr || !find_slots(version(), found.slots) ||
        dladdr(reinterpret_cast<void*>(registry), &where) == 0) {
        return false;
    }
    found.module = where.dli_fbase;
    found.registry = registry();
    return found.registry != nullptr;
}

int keep_name(dl_phdr_info* module, size_t, void* names) {
    constexpr std::array<char const*, 4> kLibraries{"libnvinfer.so", "libnvinfer_lean.so", "libnvinfer_dispatch.so",
                                                    "libtensorrt_rtx.so"};
    char const* const slash = std::strrchr(module->dlpi_name, '/');
    char const* const file = slash == nullptr ? module->dlpi_name : slash + 1;
    for (char const* library : kLibraries) {
        if (std::strncmp(file, library, std::strlen(library)) == 0) {
            static_cast<std::vector<std::string>*>(names)->emplace_back(module->dlpi_name);
        }
    }
    return 0;
}

// Every TensorRT in the process. Python loads it without its symbols becoming global, so libraries are searched by
// name.
std::vector<TensorRT> find_tensorrt() {
    std::vector<std::string> names;
    dl_iterate_phdr(keep_name, &names);
    std::vector<TensorRT> all;
    TensorRT found{};
    if (find_registry(RTLD_DEFAULT, found)) all.push_back(found);
    for (std::string const& name : names) {
        void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (handle == nullptr) continue;
        if (find_registry(handle, found)) all.push_back(found);
        dlclose(handle);
    }
    return all;
}

// Whether one of them is among the callers: it is then its loader that opens this library.
bool loaded_by(std::vector<TensorRT> const& all) {
    struct Walk {
        std::vector<TensorRT> const& all;
        bool found;
    } walk{all, false};
    auto const look = [](_Unwind_Context* frame, void* data) {
        Walk& state = *static_cast<Walk*>(data);
        Dl_info where;
        if (dladdr(reinterpret_cast<void*>(_Unwind_GetIP(frame)), &where) != 0) {
            for (TensorRT const& each : state.all) state.found = state.found || each.module == where.dli_fbase;
        }
        return state.found ? _URC_END_OF_STACK : _URC_NO_REASON;
    };
    _Unwind_Backtrace(look, &walk);
    return walk.found;
}

template <typename F>
F virtual_function(void* object, int slot) {
    return reinterpret_cast<F>((*static_cast<void***>(object))[slot]);
}

bool register_creators(TensorRT const& tensorrt) {
    using nvinfer1::IPluginCreatorInterface;
    auto const get = virtual_function<IPluginCreatorInterface* (*)(void*, char const*, char const*, char const*)>(
        tensorrt.registry, tensorrt.slots.get_creator);
    auto const add = virtual_function<bool (*)(void*, IPluginCreatorInterface&, char const*)>(
        tensorrt.registry, tensorrt.slots.register_creator);
    int32_t count = 0;
    auto const* const creators = getCreators(count);
    bool added = false;
    for (int32_t i = 0; i < count; ++i) {
        auto const& creator = static_cast<nvinfer1::IPluginCreatorV3One const&>(*creators[i]);
        char const* const space = creator.getPluginNamespace();
        if (get(tensorrt.registry, creator.getPluginName(), creator.getPluginVersion(), space) != nullptr) continue;
        added = add(tensorrt.registry, *creators[i], space) || added;
    }
    return added;
}

// Polygraphy opens plugin libraries before it imports TensorRT: libraries that are linked to TensorRT bring it along.
// This one is linked to none, and imports the one that Polygraphy will.
void import_as_polygraphy() {
    auto const python = [](char const* name) { return dlsym(RTLD_DEFAULT, name); };
    auto const is_initialized = reinterpret_cast<int (*)()>(python("Py_IsInitialized"));
    if (is_initialized == nullptr || is_initialized() == 0) return;
    auto const ensure = reinterpret_cast<int (*)()>(python("PyGILState_Ensure"));
    auto const release = reinterpret_cast<void (*)(int)>(python("PyGILState_Release"));
    auto const modules = reinterpret_cast<void* (*)()>(python("PyImport_GetModuleDict"));
    auto const find = reinterpret_cast<void* (*)(void*, char const*)>(python("PyDict_GetItemString"));
    auto const import = reinterpret_cast<void* (*)(char const*)>(python("PyImport_ImportModule"));
    auto const forget = reinterpret_cast<void (*)(void*)>(python("Py_DecRef"));
    auto const clear_error = reinterpret_cast<void (*)()>(python("PyErr_Clear"));
    if (!(ensure && release && modules && find && import && forget && clear_error)) return;
    int const state = ensure();
    if (find(modules(), "polygraphy") != nullptr) {
        char const* const rtx = std::getenv("POLYGRAPHY_USE_TENSORRT_RTX");
        void* const module = import(rtx != nullptr && std::strcmp(rtx, "1") == 0 ? "tensorrt_rtx" : "tensorrt");
        if (module != nullptr) forget(module);
        clear_error();
    }
    release(state);
}

// What is registered must stay where it is.
void keep_loaded() {
    Dl_info where;
    if (dladdr(reinterpret_cast<void*>(&keep_loaded), &where) != 0) {
        dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    }
}

__attribute__((constructor)) void register_in_every_tensorrt() {
    try {
        std::vector<TensorRT> all = find_tensorrt();
        if (loaded_by(all)) return;
        if (all.empty()) {
            import_as_polygraphy();
            all = find_tensorrt();
        }
        offer_unversioned_name();
        bool added = false;
        for (TensorRT const& tensorrt : all) added = register_creators(tensorrt) || added;
        if (added) keep_loaded();
    } catch (...) {  // out of memory; a constructor of a library may not throw
    }
}

}  // namespace
}  // namespace trt_nvfp4
