// A CUDA runtime without a GPU: allocations and launches go to callbacks, everything else is answered here.
//
// Device memory is host memory, so copies are memmove and a device pointer is the host address. Every operation is
// complete when its call returns. What is missing is missing as a symbol: the program then fails to load, by name.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "callbacks.h"

namespace {

struct Module {
    const void* image;  // the fatbin
};

struct Function {
    const Module* module;
    std::string name;
};

struct Variable {
    const Module* module;
    std::string name;
    size_t size;
};

// Without an emulator, before it comes and after it went: programs free what their globals hold when the process ends.
constexpr ShimCallbacks kNobody = {
    [](uint64_t) -> uint64_t { return 0; },
    [](uint64_t) -> int32_t { return cudaSuccess; },
    [](uint64_t, uint64_t) -> int32_t { return 0; },
    [](const ShimLaunch*) -> int32_t { return cudaErrorNoDevice; },
    [](const void*, const char*, ShimFunctionInfo*) -> int32_t { return cudaErrorNoDevice; },
    [](const void*, const char*, int32_t) -> int32_t { return cudaErrorNoDevice; },
    [](const void*, const char*, int32_t) -> int32_t { return cudaErrorNoDevice; },
    [](const void*, const char*) -> uint64_t { return 0; },
    [](int32_t, int32_t*) -> int32_t { return cudaErrorNoDevice; },
    [] { return int32_t{0}; },
    [](void*, int32_t, uint32_t, uint64_t, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int32_t,
       int32_t, int32_t, int32_t) -> int32_t { return CUDA_ERROR_NO_DEVICE; },
};

}  // namespace

ShimCallbacks shim::callbacks = kNobody;

namespace {

using shim::callbacks;
using shim::on_device;

std::map<const void*, Function*> functions;
std::map<const void*, Variable> variables;
std::mutex registration;
thread_local cudaError_t last_error = cudaSuccess;

struct CallConfiguration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> configurations;

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t check(int32_t status) { return fail(static_cast<cudaError_t>(status)); }

struct Error {
    cudaError_t code;
    const char *name, *text;
};

const Error& describe(cudaError_t code) {
    static const Error errors[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
        {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
        {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
        {cudaErrorNotSupported, "cudaErrorNotSupported", "not supported by the emulator's CUDA runtime"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "the emulator stopped the kernel"},
    };
    static const Error other = {cudaErrorUnknown, "cudaErrorUnknown", "error of the emulator's CUDA runtime"};
    for (const Error& error : errors)
        if (error.code == code) return error;
    return other;
}

// A kernel by its host stub, or by the handle that __cudaGetKernel gave for it.
const Function* find(const void* kernel) {
    auto found = functions.find(kernel);
    if (found != functions.end()) return found->second;
    for (const auto& [stub, function] : functions)
        if (function == kernel) return function;
    return nullptr;
}

cudaError_t copy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
    if (size == 0) return cudaSuccess;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((to_device && !on_device(target, size)) || (from_device && !on_device(source, size)))
        return fail(cudaErrorInvalidValue);
    std::memmove(target, source, size);
    return cudaSuccess;
}

cudaError_t set(void* target, int value, size_t size) {
    if (size == 0) return cudaSuccess;
    if (!on_device(target, size)) return fail(cudaErrorInvalidValue);
    std::memset(target, value, size);
    return cudaSuccess;
}

cudaError_t allocate(void** pointer, size_t size) {
    *pointer = reinterpret_cast<void*>(callbacks.allocate(size));
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t release(void* pointer) {
    return pointer ? check(callbacks.release(reinterpret_cast<uint64_t>(pointer))) : cudaSuccess;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, dim3 cluster, dim3 preferred, void** arguments,
                   size_t shared_bytes, bool cooperative, bool programmatic = false) {
    const Function* function = find(kernel);
    if (!function) return fail(cudaErrorInvalidDeviceFunction);
    if (grid.x * grid.y * grid.z == 0 || block.x * block.y * block.z == 0) return fail(cudaErrorInvalidConfiguration);
    ShimLaunch request{function->module->image,
                       function->name.c_str(),
                       {grid.x, grid.y, grid.z},
                       {block.x, block.y, block.z},
                       {cluster.x, cluster.y, cluster.z},
                       {preferred.x, preferred.y, preferred.z},
                       shared_bytes,
                       arguments,
                       cooperative,
                       programmatic};
    return check(callbacks.launch(&request));
}

int attribute(int which) {
    int32_t value = 0;
    callbacks.attribute(which, &value);
    return value;
}

uint64_t symbol_address(const void* symbol) {
    auto found = variables.find(symbol);
    return found == variables.end() ? 0 : callbacks.symbol(found->second.module->image, found->second.name.c_str());
}

}  // namespace

extern "C" {

void shim_set_callbacks(const ShimCallbacks* table) { callbacks = table ? *table : kNobody; }

// ---- what nvcc's host code calls

void** __cudaRegisterFatBinary(void* wrapper) {
    struct Wrapper {
        int magic, version;
        const void* image;
        void* unused;
    };
    return reinterpret_cast<void**>(new Module{static_cast<Wrapper*>(wrapper)->image});
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
    auto* module = reinterpret_cast<Module*>(handle);
    std::lock_guard<std::mutex> lock(registration);
    for (auto it = functions.begin(); it != functions.end();) {
        bool mine = it->second->module == module;
        if (mine) delete it->second;
        it = mine ? functions.erase(it) : std::next(it);
    }
    for (auto it = variables.begin(); it != variables.end();)
        it = it->second.module == module ? variables.erase(it) : std::next(it);
    delete module;
}

void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    std::lock_guard<std::mutex> lock(registration);
    functions[stub] = new Function{reinterpret_cast<Module*>(handle), name};
}

void __cudaRegisterVar(void** handle, char* variable, char*, const char* name, int, size_t size, int, int) {
    std::lock_guard<std::mutex> lock(registration);
    variables[variable] = {reinterpret_cast<Module*>(handle), name, size};
}

char __cudaInitModule(void**) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    const Function* function = find(stub);
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<Function*>(function));
    return function ? cudaSuccess : fail(cudaErrorInvalidDeviceFunction);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t) {
    return launch(kernel, grid, block, dim3(0, 0, 0), dim3(0, 0, 0), arguments, shared_bytes, false);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
    CallConfiguration configuration = configurations.back();
    configurations.pop_back();
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *static_cast<cudaStream_t*>(stream) = configuration.stream;
    return cudaSuccess;
}

// ---- launches

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
    return launch(kernel, grid, block, dim3(0, 0, 0), dim3(0, 0, 0), arguments, shared_bytes, false);
}

cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t) {
    return launch(kernel, grid, block, dim3(0, 0, 0), dim3(0, 0, 0), arguments, shared_bytes, true);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
    dim3 cluster(0, 0, 0), preferred(0, 0, 0);
    bool cooperative = false, programmatic = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        switch (attribute.id) {
            case cudaLaunchAttributeClusterDimension:
                cluster = dim3(attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z);
                break;
            case cudaLaunchAttributePreferredClusterDimension: {
                const auto& dim = attribute.val.preferredClusterDim;
                preferred = dim3(dim.x, dim.y, dim.z);
                break;
            }
            case cudaLaunchAttributeCooperative:
                cooperative = attribute.val.cooperative != 0;
                break;
            case cudaLaunchAttributeProgrammaticStreamSerialization:
                programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
                break;
            // Scheduling and priorities are hints.
            case cudaLaunchAttributeIgnore:
            case cudaLaunchAttributeClusterSchedulingPolicyPreference:
            case cudaLaunchAttributePriority:
                break;
            default:
                return fail(cudaErrorNotSupported);
        }
    }
    return launch(kernel, config->gridDim, config->blockDim, cluster, preferred, arguments, config->dynamicSmemBytes,
                  cooperative, programmatic);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    const Function* function = find(kernel);
    if (!function) return fail(cudaErrorInvalidDeviceFunction);
    ShimFunctionInfo info{};
    if (cudaError_t error = check(callbacks.function_info(function->module->image, function->name.c_str(), &info)))
        return error;
    *attributes = {};
    attributes->maxThreadsPerBlock = info.max_threads;
    attributes->sharedSizeBytes = info.shared_bytes;
    attributes->localSizeBytes = info.local_bytes;
    attributes->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - info.shared_bytes;
    attributes->numRegs = 32;  // unknown before ptxas
    attributes->ptxVersion = info.ptx_version;
    attributes->binaryVersion =
        attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
    const Function* function = find(kernel);
    if (!function) return fail(cudaErrorInvalidDeviceFunction);
    if (which == cudaFuncAttributeNonPortableClusterSizeAllowed)
        return check(callbacks.allow_clusters(function->module->image, function->name.c_str(), value));
    if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    return check(callbacks.allow_shared(function->module->image, function->name.c_str(), value));
}

cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }

// The emulator runs one CTA per SM, so this is the occupancy that a grid barrier may rely on.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads,
                                                                   size_t shared_bytes, unsigned) {
    cudaFuncAttributes attributes;
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    *blocks = threads <= attributes.maxThreadsPerBlock &&
              shared_bytes <= static_cast<size_t>(attributes.maxDynamicSharedSizeBytes);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared_bytes, 0);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
    unsigned size = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            const auto& dim = config->attrs[i].val.clusterDim;
            size = dim.x * dim.y * dim.z;
        }
    *clusters = attribute(cudaDevAttrMultiProcessorCount) / static_cast<int>(size);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void*, const cudaLaunchConfig_t*) {
    *size = 8;
    return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate(pointer, size); }
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return allocate(pointer, size); }
cudaError_t cudaMallocHost(void** pointer, size_t size) { return allocate(pointer, size); }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return allocate(pointer, size); }
cudaError_t cudaMallocManaged(void** pointer, size_t size, unsigned) { return allocate(pointer, size); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

cudaError_t cudaHostGetDevicePointer(void** pointer, void* host, unsigned) {
    *pointer = host;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
    return copy(target, source, size, kind);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t) {
    return copy(target, source, size, kind);
}

cudaError_t cudaMemcpy2D(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind) {
    for (size_t row = 0; row < height; ++row)
        if (cudaError_t error = copy(static_cast<char*>(target) + row * target_pitch,
                                     static_cast<const char*>(source) + row * source_pitch, width, kind))
            return error;
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy2D(target, target_pitch, source, source_pitch, width, height, kind);
}

cudaError_t cudaMemset(void* target, int value, size_t size) { return set(target, value, size); }
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t) { return set(target, value, size); }

cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
    *pointer = reinterpret_cast<void*>(symbol_address(symbol));
    return *pointer ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}

cudaError_t cudaGetSymbolSize(size_t* size, const void* symbol) {
    auto found = variables.find(symbol);
    if (found == variables.end()) return fail(cudaErrorInvalidSymbol);
    *size = found->second.size;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* source, size_t size, size_t offset, cudaMemcpyKind) {
    uint64_t address = symbol_address(symbol);
    if (!address) return fail(cudaErrorInvalidSymbol);
    return copy(reinterpret_cast<char*>(address) + offset, source, size, cudaMemcpyHostToDevice);
}

cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* source, size_t size, size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpyToSymbol(symbol, source, size, offset, kind);
}

cudaError_t cudaMemcpyFromSymbol(void* target, const void* symbol, size_t size, size_t offset, cudaMemcpyKind) {
    uint64_t address = symbol_address(symbol);
    if (!address) return fail(cudaErrorInvalidSymbol);
    return copy(target, reinterpret_cast<char*>(address) + offset, size, cudaMemcpyDeviceToHost);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    *attributes = {};
    bool device = on_device(pointer, 1);
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->devicePointer = device ? const_cast<void*>(pointer) : nullptr;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *free_bytes = *total = size_t{16} << 30;
    return cudaSuccess;
}

// ---- device

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    int32_t result = 0;
    cudaError_t error = check(callbacks.attribute(which, &result));
    *value = result;
    return error;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strncpy(properties->name, "PTX emulator", sizeof(properties->name) - 1);
    properties->totalGlobalMem = size_t{16} << 30;
    properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
    properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    properties->warpSize = attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX);
    properties->maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY);
    properties->maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
    properties->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
    properties->maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY);
    properties->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ);
    properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    properties->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    properties->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
    properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    properties->integrated = attribute(cudaDevAttrIntegrated);
    properties->cooperativeLaunch = attribute(cudaDevAttrCooperativeLaunch);
    properties->clusterLaunch = attribute(cudaDevAttrClusterLaunch);
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) { return describe(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return describe(error).text; }

}  // extern "C"
