// A model of several parts: its manifest, and the engine of each part.

#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "run_engines.h"
#include "weights_file.h"

namespace run_engines {

using Json = nlohmann::json;

// The manifest in `folder`, whose task must be `task`; `otherwise` says what is for the others.
inline Json manifest_of(fs::path const& folder, std::string const& task, std::string const& otherwise) {
    auto const path = folder / "components.json";
    auto const manifest = Json::parse(contents(path), nullptr, false);
    require(!manifest.is_discarded(), path.string() + ": not JSON");
    // A name becomes that of a file, which must not lie elsewhere.
    auto const require_plain = [&](std::string const& name) {
        require(!name.empty() && name.find('/') == std::string::npos,
                path.string() + ": '" + name + "' is no file name");
    };
    try {
        require(manifest.at("task") == task, folder.string() + ": " + otherwise);
        require(manifest.at("flows").is_array(), path.string() + ": its flows are no list");
        for (auto const& part : manifest.at("parts")) {
            require_plain(part.at("name").get<std::string>());
            for (auto const& port : part.at("outputs").items()) {
                require_plain(port.key());
            }
        }
    } catch (Json::exception const& error) {
        throw std::runtime_error(path.string() + ": not a manifest of parts: " + error.what());
    }
    return manifest;
}

// "part.input" -> the "part.output" that it comes from.
inline std::map<std::string, std::string> sources_of(Json const& manifest) {
    std::map<std::string, std::string> found;
    for (auto const& flow : manifest.at("flows")) {
        found[flow.at("target")] = flow.at("source");
    }
    return found;
}

inline void bind_address(nvinfer1::IExecutionContext& context, std::string const& part, std::string const& name,
                         void* address) {
    require(context.setTensorAddress(name.c_str(), address), part + ": " + name + " is not a tensor of its engine");
}

// PART.engine of every part in a folder, and the plugin library beside them.
class PartEngines {
 public:
    // The library lies there once, for all parts: so it is registered once.
    explicit PartEngines(fs::path folder) : folder_(std::move(folder)) {
        for (auto const& entry : fs::directory_iterator(folder_)) {
            if (entry.path().extension() == ".so") {
                runtime_.load_plugins(entry.path());
            }
        }
    }

    nvinfer1::ICudaEngine& load(std::string const& part) {
        auto const path = folder_ / (part + ".engine");
        return *(engines_[part] = runtime_.load(path, contents(path)));
    }

    // A context of a part that is loaded. Its weights are bound.
    std::unique_ptr<nvinfer1::IExecutionContext> context(std::string const& part) {
        auto& engine = *engines_.at(part);
        std::unique_ptr<nvinfer1::IExecutionContext> found(engine.createExecutionContext());
        require(found != nullptr, part + ".engine: TensorRT cannot create a context");
        for (auto const& [name, place] : weights_of(engine)) {
            bind_address(*found, part, name, place.get());
        }
        return found;
    }

 private:
    using Weights = std::map<std::string, DeviceBuffer>;

    // Of an engine built with --strip: its plugins' weights are inputs, and lie in a file beside it. Parts with the
    // same file have them in one place.
    Weights const& weights_of(nvinfer1::ICudaEngine const& engine) {
        static Weights const none;
        std::string const digest = trt_nvfp4::weights_digest(engine.getName());
        if (digest.empty()) {
            return none;
        }
        if (weights_.count(digest) == 0) {
            trt_nvfp4::WeightsFile file((folder_ / trt_nvfp4::weights_file_name(digest)).string(), digest);
            auto& places = weights_[digest];
            for (auto const& tensor : file.tensors()) {
                auto* place = places.emplace(tensor.name, DeviceBuffer(tensor.size)).first->second.get();
                file.read(tensor, [&](char const* bytes, std::size_t count) {
                    check(cudaMemcpy(place, bytes, count, cudaMemcpyHostToDevice), "the weights");
                    place += count;
                });
            }
        }
        return weights_.at(digest);
    }

    fs::path folder_;
    Runtime runtime_;
    std::map<std::string, Weights> weights_;  // by digest
    std::map<std::string, std::unique_ptr<nvinfer1::ICudaEngine>> engines_;
};

}  // namespace run_engines
