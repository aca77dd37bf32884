// Generates tokens, greedily, with a decoder's engine: token ids in, token ids out.
//
//   generate model.engine 32 2 < prompt.txt
//
// The arguments: an engine of build-engine, the most tokens to generate, and the ids of stop tokens. Standard input
// holds the prompt's token ids, separated by white space; the new ones are printed as they come. One sequence, whose
// caches are updated in place: input and output are bound to the same memory. The decode step runs as a CUDA graph.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "logits.h"
#include "run_engines.h"
#include "weights_file.h"

namespace {

using namespace run_engines;

class Decoder {
 public:
    // `bytes` are the engine's, and `path` names it in messages.
    Decoder(std::string const& path, std::vector<char> const& bytes) {
        if (char const* const plugins = std::getenv("TRT_NVFP4_PLUGINS")) {
            runtime_.load_plugins(plugins);
        } else {
            runtime_.allow_embedded_plugins();
        }
        engine_ = runtime_.load(path, bytes);
        require_inputs(path);
        load_weights(path);
        find_profiles();
        allocate();
    }

    std::int64_t capacity() const { return capacity_; }
    std::int64_t vocabulary() const { return vocabulary_; }

    // Appends tokens to the caches, in pieces that the profiles take; returns the likeliest next token.
    std::int64_t append(std::vector<std::int64_t> const& tokens) {
        for (std::size_t begin = 0; begin < tokens.size(); begin += longest_) {
            auto const count = std::min<std::size_t>(longest_, tokens.size() - begin);
            step(tokens.data() + begin, static_cast<std::int64_t>(count));
        }
        return argmax();
    }

 private:
    struct Profile {
        int index;
        std::int64_t fewest, most;
    };

    static bool starts_with(std::string const& text, char const* prefix) { return text.rfind(prefix, 0) == 0; }

    void require_inputs(std::string const& path) {
        for (int i = 0; i < engine_->getNbIOTensors(); ++i) {
            std::string const name = engine_->getIOTensorName(i);
            if (starts_with(name, "past_key_values.")) {
                caches_.push_back(name);
            }
        }
        require(!caches_.empty(), path + ": this engine has no cache; build one with build-engine DIR --task generate");
        for (auto const& name : caches_) {
            require(
                engine_->getTensorShape(name.c_str()).nbDims == 4,
                path + ": " + name + " holds several layers (--kinds all,decoder), which this program does not know");
        }
        capacity_ = engine_->getTensorShape(caches_.front().c_str()).d[2];
        auto const logits = engine_->getTensorShape("logits");
        require(logits.nbDims == 3, path + ": this engine has no logits [batch, tokens, vocabulary]");
        vocabulary_ = logits.d[2];
    }

    // Of an engine built with --strip: its plugins' weights are inputs, and lie in a file beside it.
    void load_weights(std::string const& path) {
        std::string const digest = trt_nvfp4::weights_digest(engine_->getName());
        if (digest.empty()) {
            return;
        }
        std::size_t const folder = path.find_last_of('/') + 1;
        trt_nvfp4::WeightsFile file(path.substr(0, folder) + trt_nvfp4::weights_file_name(digest), digest);
        for (auto const& tensor : file.tensors()) {
            bind(tensor.name, tensor.size);
            auto* place = static_cast<char*>(addresses_.back().second);
            file.read(tensor, [&](char const* bytes, std::size_t count) {
                check(cudaMemcpy(place, bytes, count, cudaMemcpyHostToDevice), "the weights");
                place += count;
            });
        }
    }

    void find_profiles() {
        for (int i = 0; i < engine_->getNbOptimizationProfiles(); ++i) {
            auto const least = engine_->getProfileShape("input_ids", i, nvinfer1::OptProfileSelector::kMIN);
            auto const most = engine_->getProfileShape("input_ids", i, nvinfer1::OptProfileSelector::kMAX);
            profiles_.push_back({i, least.d[1], most.d[1]});
            longest_ = std::max<std::size_t>(longest_, most.d[1]);
        }
        contexts_.resize(profiles_.size());
    }

    void allocate() {
        logits_type_ = engine_->getTensorDataType("logits");
        bind("input_ids", longest_ * sizeof(std::int64_t));
        bind("past_length", sizeof(std::int64_t));
        bind("new_length", sizeof(std::int64_t));
        // A drafter reads them (build-engine --draft), which this program does not run.
        if (char const* hidden = "hidden_states"; engine_->getTensorIOMode(hidden) == nvinfer1::TensorIOMode::kOUTPUT) {
            bind(hidden,
                 longest_ * engine_->getTensorShape(hidden).d[2] * bytes_of(engine_->getTensorDataType(hidden)));
        }
        for (auto const& name : caches_) {
            auto const shape = engine_->getTensorShape(name.c_str());
            bind(name, bytes_of(engine_->getTensorDataType(name.c_str())) * shape.d[1] * shape.d[2] * shape.d[3]);
            addresses_.push_back({"present." + name.substr(name.find('.') + 1), addresses_.back().second});
        }
    }

    void bind(std::string const& name, std::size_t bytes) {
        buffers_.emplace_back(bytes);
        addresses_.push_back({name, buffers_.back().get()});
    }

    // Logits come of a step's last tokens, or of all: the context says of how many, once its shapes are set.
    void take_logits(nvinfer1::IExecutionContext& context) {
        std::int64_t const rows = context.getTensorShape("logits").d[1];
        std::size_t const bytes = rows * vocabulary_ * bytes_of(logits_type_);
        if (bytes > logits_.size()) {
            logits_.resize(bytes);
            logits_on_device_ = std::make_unique<DeviceBuffer>(bytes);
        }
        require(context.setTensorAddress("logits", logits_on_device_->get()), "logits: not a tensor of the engine");
        last_ = rows - 1;
    }

    nvinfer1::IExecutionContext& context_for(std::int64_t tokens) {
        Profile const* chosen = nullptr;
        for (auto const& profile : profiles_) {
            bool const fits = profile.fewest <= tokens && tokens <= profile.most;
            if (fits && (chosen == nullptr || profile.most < chosen->most)) {
                chosen = &profile;
            }
        }
        require(chosen != nullptr, "a step of " + std::to_string(tokens) + " tokens fits no profile of the engine");
        auto& context = contexts_[chosen->index];
        if (context == nullptr) {
            context.reset(engine_->createExecutionContext());
            require(context != nullptr && context->setOptimizationProfileAsync(chosen->index, stream_.get()),
                    "TensorRT cannot create a context for this engine");
            for (auto const& [name, address] : addresses_) {
                require(context->setTensorAddress(name.c_str(), address), name + ": not a tensor of the engine");
            }
            for (auto const& name : caches_) {
                auto shape = engine_->getTensorShape(name.c_str());
                shape.d[0] = 1;
                require(context->setInputShape(name.c_str(), shape), name + ": TensorRT refuses a batch of one");
            }
            for (char const* name : {"past_length", "new_length"}) {
                require(context->setInputShape(name, nvinfer1::Dims{1, {1}}), std::string(name) + ": not [batch]");
            }
        }
        require(context->setInputShape("input_ids", nvinfer1::Dims2{1, tokens}), "input_ids: not [batch, new]");
        return *context;
    }

    void step(std::int64_t const* ids, std::int64_t count) {
        copy_in("input_ids", ids, count);
        copy_in("past_length", &past_, 1);
        copy_in("new_length", &count, 1);
        auto& context = context_for(count);
        take_logits(context);
        auto const enqueue = [&] { return context.enqueueV3(stream_.get()); };
        // The second step of one token is recorded.
        if (count == 1 && ++single_steps_ == 2) {
            graph_.record(stream_, enqueue);
        }
        if (count == 1 && graph_.recorded()) {
            graph_.launch(stream_);
        } else {
            require(enqueue(), "TensorRT could not run this engine");
        }
        stream_.wait("the step");
        past_ += count;
    }

    void copy_in(char const* name, std::int64_t const* values, std::int64_t count) {
        auto const found =
            std::find_if(addresses_.begin(), addresses_.end(), [&](auto& entry) { return entry.first == name; });
        check(
            cudaMemcpyAsync(found->second, values, count * sizeof(std::int64_t), cudaMemcpyHostToDevice, stream_.get()),
            name);
    }

    std::int64_t argmax() {
        std::size_t const row = vocabulary_ * bytes_of(logits_type_);
        auto const* last = static_cast<char const*>(logits_on_device_->get()) + last_ * row;
        check(cudaMemcpy(logits_.data(), last, row, cudaMemcpyDeviceToHost), "logits");
        return likeliest(logits_type_, logits_.data(), vocabulary_);
    }

    Stream stream_;
    Runtime runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::vector<std::unique_ptr<nvinfer1::IExecutionContext>> contexts_;
    std::vector<Profile> profiles_;
    std::vector<std::string> caches_;
    std::vector<DeviceBuffer> buffers_;
    std::vector<std::pair<std::string, void*>> addresses_;
    std::vector<char> logits_;
    std::unique_ptr<DeviceBuffer> logits_on_device_;
    nvinfer1::DataType logits_type_{};
    Graph graph_;
    std::size_t longest_{};
    std::int64_t capacity_{}, vocabulary_{}, past_{}, last_{};
    int single_steps_{};
};

int run(int argc, char** argv) {
    require(argc >= 3, "usage: generate ENGINE MAX_NEW_TOKENS [STOP_TOKEN...] < token ids of the prompt");
    auto const most = whole_number("MAX_NEW_TOKENS", argv[2]);
    require(most > 0, "MAX_NEW_TOKENS: expected 1 or more");
    std::vector<std::int64_t> stop;
    for (int i = 3; i < argc; ++i) {
        stop.push_back(whole_number("STOP_TOKEN", argv[i]));
    }
    std::vector<std::int64_t> const prompt(std::istream_iterator<std::int64_t>(std::cin), {});
    require(std::cin.eof() && !prompt.empty(), "the prompt must be token ids separated by white space");

    auto const engine = contents(argv[1]);
    Decoder decoder(argv[1], engine);
    auto length = static_cast<std::int64_t>(prompt.size());
    require(length <= decoder.capacity(), "the prompt has " + std::to_string(length) + " tokens, and the caches hold " +
                                              std::to_string(decoder.capacity()));
    for (std::int64_t const token : prompt) {
        require(token >= 0 && token < decoder.vocabulary(),
                "token " + std::to_string(token) + " is not in the vocabulary");
    }
    std::int64_t token = decoder.append(prompt);
    for (std::int64_t count = 1;; ++count) {
        std::cout << token << std::endl;
        if (count == most || std::find(stop.begin(), stop.end(), token) != stop.end()) {
            return 0;
        }
        if (length == decoder.capacity()) {
            std::cerr << "the caches are full: " << decoder.capacity() << " tokens\n";
            return 0;
        }
        ++length;
        token = decoder.append({token});
    }
}

}  // namespace

int main(int argc, char** argv) { return run_engines::guarded(run, argc, argv); }
