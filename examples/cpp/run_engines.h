// What programs that run engines have in common: errors, GPU memory, TensorRT's runtime, CUDA graphs.

#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace run_engines {

namespace fs = std::filesystem;

inline void check(cudaError_t status, std::string const& what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(what + ": " + cudaGetErrorString(status));
    }
}

inline void require(bool holds, std::string const& message) {
    if (!holds) {
        throw std::runtime_error(message);
    }
}

// A whole number of the command line; `what` names it in messages.
inline std::int64_t whole_number(std::string const& what, char const* text) {
    char* end = nullptr;
    errno = 0;
    std::int64_t const value = std::strtoll(text, &end, 10);
    require(end != text && *end == '\0' && errno == 0, what + ": expected a whole number, found '" + text + "'");
    return value;
}

inline std::vector<char> contents(fs::path const& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    require(!bytes.empty(), path.string() + ": cannot be read, or is empty");
    return bytes;
}

class Stream {
 public:
    Stream() { check(cudaStreamCreate(&stream_), "this program needs an NVIDIA GPU"); }
    Stream(Stream const&) = delete;
    Stream& operator=(Stream const&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    cudaStream_t get() const { return stream_; }
    void wait(std::string const& what) const { check(cudaStreamSynchronize(stream_), what); }

 private:
    cudaStream_t stream_{};
};

// GPU memory, zeroed: what a mask leaves out is multiplied by 0, and NaN times 0 would be NaN.
class DeviceBuffer {
 public:
    explicit DeviceBuffer(std::size_t bytes) {
        check(cudaMalloc(&pointer_, bytes), "cudaMalloc of " + std::to_string(bytes) + " bytes");
        check(cudaMemset(pointer_, 0, bytes), "cudaMemset");
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
    DeviceBuffer(DeviceBuffer const&) = delete;
    DeviceBuffer& operator=(DeviceBuffer const&) = delete;
    ~DeviceBuffer() { cudaFree(pointer_); }
    char* get() const { return static_cast<char*>(pointer_); }

 private:
    void* pointer_{};
};

// What a stream is given to do, recorded once and launched often.
class Graph {
 public:
    Graph() = default;
    Graph(Graph const&) = delete;
    Graph& operator=(Graph const&) = delete;
    ~Graph() {
        if (graph_ != nullptr) {
            cudaGraphExecDestroy(graph_);
        }
    }

    // Whether what `enqueue` puts into the stream could be recorded. It must have run before: TensorRT allocates and
    // compiles in the first run of a shape.
    template <typename Enqueue>
    bool record(Stream const& stream, Enqueue enqueue) {
        check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
        bool const enqueued = enqueue();
        cudaGraph_t graph{};
        bool const ended = cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess;
        if (enqueued && ended && cudaGraphInstantiate(&graph_, graph, 0) != cudaSuccess) {
            graph_ = nullptr;
        }
        if (graph != nullptr) {
            cudaGraphDestroy(graph);
        }
        cudaGetLastError();
        return graph_ != nullptr;
    }

    bool recorded() const { return graph_ != nullptr; }
    void launch(Stream const& stream) const { check(cudaGraphLaunch(graph_, stream.get()), "cudaGraphLaunch"); }

 private:
    cudaGraphExec_t graph_{};
};

// TensorRT's runtime. Its logger also gets what plugins say when they fail.
class Runtime {
 public:
    Runtime() : runtime_(nvinfer1::createInferRuntime(logger_)) {
        require(runtime_ != nullptr, "TensorRT's runtime cannot be created");
    }

    // Of engines built with --embed-plugins no; once for all engines of a runtime.
    void load_plugins(fs::path const& library) {
        require(runtime_->getPluginRegistry().loadLibrary(library.c_str()) != nullptr,
                library.string() + ": TensorRT cannot load this plugin library");
    }

    // Of an engine that carries the plugin library.
    void allow_embedded_plugins() { runtime_->setEngineHostCodeAllowed(true); }

    // The engine of `bytes`; `path` names it in messages.
    std::unique_ptr<nvinfer1::ICudaEngine> load(fs::path const& path, std::vector<char> const& bytes) {
        std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime_->deserializeCudaEngine(bytes.data(), bytes.size()));
        require(engine != nullptr, path.string() + ": this TensorRT cannot load it on this GPU");
        return engine;
    }

 private:
    class Logger : public nvinfer1::ILogger {
        void log(Severity severity, char const* message) noexcept override {
            if (severity <= Severity::kWARNING) {
                std::cerr << message << '\n';
            }
        }
    };

    Logger logger_;
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
};

// A program's exit code: 1 with one message where `run` throws.
inline int guarded(int (*run)(int, char**), int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (std::exception const& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 1;
    }
}

}  // namespace run_engines
