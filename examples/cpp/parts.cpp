// Runs a model of several parts: tensors in, tensors out, with the engines of build-engine and their manifest.
//
//   parts policy pixels=pixels.bin instruction=ids.bin actions=noise.bin
//
// The arguments: a folder with components.json, PART.engine of every part and the plugin library, and a file of raw
// values for every input of the whole. What no other part takes is written to PART.TENSOR.bin. Every tensor has one
// place in GPU memory and flows from part to part by its address; a part with a loop runs on two places in turn. The
// whole chain, all turns included, is one CUDA graph. For models with fixed shapes; generate_parts.cpp is for those
// that generate tokens.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "part_engines.h"
#include "run_engines.h"

namespace {

using namespace run_engines;

// Bytes of one value of a manifest's type.
std::size_t item_bytes(std::string const& type) {
    static std::map<std::string, std::size_t> const sizes{
        {"int64", 8}, {"float32", 4}, {"int32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int8", 1}, {"bool", 1},
    };
    auto const found = sizes.find(type);
    require(found != sizes.end(), type + ": a type that this program does not know");
    return found->second;
}

std::size_t bytes_of(std::string const& name, Json const& port) {
    auto bytes = item_bytes(port.at("dtype"));
    for (auto const& dim : port.at("shape")) {
        require(dim.is_number_integer() && dim.get<std::int64_t>() >= 0,
                name + ": has a dimension that may change, which this program does not choose");
        bytes *= dim.get<std::size_t>();
    }
    return bytes;
}

// A number as the type of a port; `bytes` is of its item.
std::vector<char> number(std::string const& type, double value) {
    std::vector<char> found(item_bytes(type));
    float const single = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &single, sizeof(bits));
    if (type == "float32") {
        std::memcpy(found.data(), &single, found.size());
    } else if (type == "bfloat16") {
        // To the nearest, ties to even.
        auto const rounded = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
        std::memcpy(found.data(), &rounded, found.size());
    } else if (type == "float16") {
        // Scaled so that rounding to 11 bits is that of an addition; for numbers of 0 and 2^-14 to 65504.
        auto const magnitude = bits & 0x7fffffffu;
        auto const half = magnitude == 0 ? 0u : (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        auto const signed_half = static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
        std::memcpy(found.data(), &signed_half, found.size());
    } else {
        require(type == "int64", type + ": a loop gives numbers to an input of this type");
        auto const whole = static_cast<std::int64_t>(value);
        std::memcpy(found.data(), &whole, found.size());
    }
    return found;
}

class Parts {
 public:
    Parts(fs::path const& folder, Json manifest)
        : manifest_(std::move(manifest)), engines_(folder), sources_(sources_of(manifest_)) {
        for (auto const& part : manifest_.at("parts")) {
            load(part);
        }
    }

    // Copies an input of the whole to the GPU.
    void give(std::string const& name, fs::path const& file) {
        auto const found = inputs_.find(name);
        require(found != inputs_.end(), name + ": not an input of this model");
        auto const bytes = contents(file);
        require(bytes.size() == found->second, file.string() + ": holds " + std::to_string(bytes.size()) +
                                                   " bytes, and " + name + " has " + std::to_string(found->second));
        check(cudaMemcpy(places_.at(name).get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), name);
        given_[name] = true;
    }

    // Runs the chain twice, the second time as a graph; returns the milliseconds of that.
    double run() {
        for (auto const& [name, size] : inputs_) {
            require(given_[name], name + ": this input is missing (" + std::to_string(size) + " bytes)");
        }
        enqueue();
        stream_.wait("the chain");
        require(graph_.record(stream_, [this] { return enqueue(), true; }),
                "the chain cannot be recorded as a CUDA graph");
        auto const begun = std::chrono::steady_clock::now();
        graph_.launch(stream_);
        stream_.wait("the chain");
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
    }

    // Writes what no other part takes.
    void write() const {
        for (auto const& part : manifest_.at("parts")) {
            for (auto const& [name, port] : part.at("outputs").items()) {
                auto const tensor = part.at("name").get<std::string>() + "." + name;
                bool taken = false;
                for (auto const& entry : sources_) {
                    taken = taken || entry.second == tensor;
                }
                if (!taken) {
                    std::vector<char> bytes(bytes_of(tensor, port));
                    check(cudaMemcpy(bytes.data(), last_.at(tensor), bytes.size(), cudaMemcpyDeviceToHost), tensor);
                    std::ofstream file(tensor + ".bin", std::ios::binary);
                    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
                    require(file.good(), tensor + ".bin: cannot be written");
                    std::cout << tensor << ".bin\n";
                }
            }
        }
    }

 private:
    void load(Json const& part) {
        auto const name = part.at("name").get<std::string>();
        engines_.load(name);
        contexts_.push_back(engines_.context(name));
        auto const numbers = part.at("loop").is_null() ? Json::object() : part.at("loop").at("values");
        for (auto const& [input, port] : part.at("inputs").items()) {
            auto const tensor = name + "." + input;
            auto const size = bytes_of(tensor, port);
            if (numbers.contains(input)) {
                place_numbers(tensor, port, numbers.at(input));
            } else if (sources_.count(tensor) == 0 && inputs_.emplace(input, size).second) {
                places_.emplace(input, DeviceBuffer(size));
            }
        }
        for (auto const& [output, port] : part.at("outputs").items()) {
            auto const tensor = name + "." + output;
            places_.emplace(tensor, DeviceBuffer(bytes_of(tensor, port)));
            if (!part.at("loop").is_null() && part.at("loop").at("carry").contains(output)) {
                places_.emplace(tensor + ", second", DeviceBuffer(bytes_of(tensor, port)));
            }
        }
    }

    // The numbers of all turns, each at an address that TensorRT takes.
    void place_numbers(std::string const& tensor, Json const& port, Json const& numbers) {
        auto const size = bytes_of(tensor, port);
        require(size <= kAlignment, tensor + ": a loop gives it numbers, and it is large");
        auto& place = places_.emplace(tensor, DeviceBuffer(kAlignment * numbers.size())).first->second;
        for (std::size_t turn = 0; turn < numbers.size(); ++turn) {
            auto const item = number(port.at("dtype"), numbers[turn].get<double>());
            for (std::size_t at = 0; at < size; at += item.size()) {
                check(
                    cudaMemcpy(place.get() + turn * kAlignment + at, item.data(), item.size(), cudaMemcpyHostToDevice),
                    tensor);
            }
        }
    }

    void enqueue() {
        std::size_t index = 0;
        for (auto const& part : manifest_.at("parts")) {
            run_part(part, *contexts_[index++]);
        }
    }

    void run_part(Json const& part, nvinfer1::IExecutionContext& context) {
        auto const name = part.at("name").get<std::string>();
        auto const& loop = part.at("loop");
        auto const times = loop.is_null() ? 1 : loop.at("times").get<std::size_t>();
        auto const carry = loop.is_null() ? Json::object() : loop.at("carry");
        auto const numbers = loop.is_null() ? Json::object() : loop.at("values");
        std::map<std::string, void*> carried;
        for (std::size_t turn = 0; turn < times; ++turn) {
            for (auto const& [input, port] : part.at("inputs").items()) {
                auto const tensor = name + "." + input;
                auto const source = sources_.find(tensor);
                void* address = carried.count(input) != 0  ? carried.at(input)
                                : numbers.contains(input)  ? places_.at(tensor).get() + turn * kAlignment
                                : source != sources_.end() ? last_.at(source->second)
                                                           : places_.at(input).get();
                bind_address(context, name, input, address);
            }
            for (auto const& [output, port] : part.at("outputs").items()) {
                auto const tensor = name + "." + output;
                // What the next turn reads is not written by it.
                bool const second = carry.contains(output) && turn % 2 == 1;
                last_[tensor] = places_.at(second ? tensor + ", second" : tensor).get();
                bind_address(context, name, output, last_.at(tensor));
            }
            require(context.enqueueV3(stream_.get()), name + ": TensorRT could not run this part");
            for (auto const& [output, target] : carry.items()) {
                carried[target.get<std::string>()] = last_.at(name + "." + output);
            }
        }
    }

    static constexpr std::size_t kAlignment = 256;

    Json manifest_;
    Stream stream_;
    PartEngines engines_;
    std::vector<std::unique_ptr<nvinfer1::IExecutionContext>> contexts_;
    std::map<std::string, std::string> sources_;  // "part.input" -> "part.output"
    std::map<std::string, std::size_t> inputs_;   // of the whole, with their bytes
    std::map<std::string, bool> given_;
    std::map<std::string, DeviceBuffer> places_;
    std::map<std::string, void*> last_;  // where each output is after the part's last turn
    Graph graph_;
};

int run(int argc, char** argv) {
    require(argc >= 2, "usage: parts FOLDER [INPUT=FILE...]");
    Parts parts(argv[1], manifest_of(argv[1], "run", "this model generates tokens; see generate_parts.cpp"));
    for (int i = 2; i < argc; ++i) {
        std::string const argument = argv[i];
        auto const at = argument.find('=');
        require(at != std::string::npos, argument + ": expected INPUT=FILE");
        parts.give(argument.substr(0, at), argument.substr(at + 1));
    }
    std::cerr << parts.run() << " ms\n";
    parts.write();
    return 0;
}

}  // namespace

int main(int argc, char** argv) { return run_engines::guarded(run, argc, argv); }
