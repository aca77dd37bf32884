// Generates tokens, greedily, with a model of several parts: images or sound and token ids in, token ids out.
//
//   generate_parts paligemma 32 1 pixel_values=pixels.bin < prompt.txt
//   generate_parts whisper 64 50257 input_features=sound.bin < /dev/null
//
// The arguments: a folder with components.json, PART.engine of every part and the plugin library; the most tokens to
// generate; ids of stop tokens; and files of raw values for what the encoder takes. Standard input holds token ids,
// separated by white space: the prompt, in which an image's token stands once for every image; of a model that
// translates text, the text. A model with an encoder of its own begins with the manifest's start tokens, and where it
// reads sound or an image, with those of standard input if there are any. One sequence: the encoder runs once, caches
// are updated in place, and a step of one token is a CUDA graph.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "logits.h"
#include "part_engines.h"
#include "run_engines.h"

namespace {

using namespace run_engines;
using Ids = std::vector<std::int64_t>;

std::size_t volume(nvinfer1::Dims const& dims) {
    std::size_t found = 1;
    for (int i = 0; i < dims.nbDims; ++i) {
        found *= static_cast<std::size_t>(dims.d[i]);
    }
    return found;
}

std::string text_of(nvinfer1::Dims const& dims) {
    std::string found;
    for (int i = 0; i < dims.nbDims; ++i) {
        found += (i == 0 ? "" : "x") + std::to_string(dims.d[i]);
    }
    return found;
}

// A tensor in GPU memory.
struct Place {
    char* address{};
    nvinfer1::Dims dims{};
};

// Runs parts by name: inputs that no other part makes are given, all else flows.
class Chain {
 public:
    Chain(fs::path const& folder, Json manifest)
        : manifest_(std::move(manifest)), engines_(folder), sources_(sources_of(manifest_)) {
        for (auto const& part : manifest_.at("parts")) {
            auto const name = part.at("name").get<std::string>();
            auto& engine = engines_.load(name);
            loaded_.emplace(name, &engine);
            contexts_[name].resize(engine.getNbOptimizationProfiles());
        }
    }

    Json const& settings() const { return manifest_.at("settings"); }
    Stream const& stream() const { return stream_; }
    bool has(std::string const& part) const { return loaded_.count(part) != 0; }
    nvinfer1::ICudaEngine const& engine(std::string const& part) const { return *loaded_.at(part); }
    Place const& output(std::string const& tensor) const { return places_.at(tensor); }

    // Names of a part's inputs, or of its outputs.
    std::vector<std::string> names(std::string const& part, char const* ports) const {
        std::vector<std::string> found;
        for (auto const& each : manifest_.at("parts")) {
            if (each.at("name") == part) {
                for (auto const& port : each.at(ports).items()) {
                    found.push_back(port.key());
                }
            }
        }
        return found;
    }

    // The parts in front of the embedding and the decoder.
    std::vector<std::string> encoders() const {
        std::vector<std::string> found;
        for (auto const& part : manifest_.at("parts")) {
            auto const name = part.at("name").get<std::string>();
            if (name != "embed" && name != "decoder") {
                found.push_back(name);
            }
        }
        return found;
    }

    bool comes_from_outside(std::string const& part, std::string const& input) const {
        return sources_.count(part + "." + input) == 0;
    }

    // Values of an input of the whole.
    void give(std::string const& name, void const* values, nvinfer1::Dims const& dims, std::size_t item) {
        auto& place = placed(name, dims, item);
        check(cudaMemcpyAsync(place.address, values, volume(dims) * item, cudaMemcpyHostToDevice, stream_.get()), name);
    }

    // Zeros, once.
    void give_zeros(std::string const& name, nvinfer1::Dims const& dims, std::size_t item) { placed(name, dims, item); }

    // Puts a part into the stream. An output named in `in_place` has the memory of that input.
    void run(std::string const& part, std::map<std::string, std::string> const& in_place = {}) {
        std::map<std::string, Place> inputs;
        for (auto const& name : names(part, "inputs")) {
            auto const source = sources_.find(part + "." + name);
            auto const found = places_.find(source == sources_.end() ? name : source->second);
            require(found != places_.end(), part + ": its input " + name + " is missing; add " + name + "=FILE");
            inputs[name] = found->second;
        }
        auto& context = context_for(part, inputs);
        for (auto const& [name, place] : inputs) {
            require(context.setInputShape(name.c_str(), place.dims), part + ": TensorRT refuses the shape of " + name);
            bind_address(context, part, name, place.address);
        }
        for (auto const& name : names(part, "outputs")) {
            auto const same = in_place.find(name);
            auto const item = bytes_of(engine(part).getTensorDataType(name.c_str()));
            bind_address(context, part, name,
                         same != in_place.end()
                             ? inputs.at(same->second).address
                             : placed(part + "." + name, context.getTensorShape(name.c_str()), item).address);
        }
        require(context.enqueueV3(stream_.get()), part + ": TensorRT could not run this part");
    }

 private:
    // Memory of this name; it stays where it is while no larger tensor comes.
    Place& placed(std::string const& name, nvinfer1::Dims const& dims, std::size_t item) {
        auto const bytes = std::max<std::size_t>(1, volume(dims) * item);
        auto& place = places_[name];
        if (auto& size = sizes_[name]; bytes > size) {
            stream_.wait("the parts before");
            size = bytes;
            buffers_.erase(name);
            place.address = buffers_.emplace(name, DeviceBuffer(bytes)).first->second.get();
        }
        place.dims = dims;
        return place;
    }

    // The context of the smallest profile that takes these shapes.
    nvinfer1::IExecutionContext& context_for(std::string const& part, std::map<std::string, Place> const& inputs) {
        auto const& engine = *loaded_.at(part);
        int chosen = -1;
        std::size_t smallest = 0;
        for (int profile = 0; profile < engine.getNbOptimizationProfiles(); ++profile) {
            std::size_t size = 0;
            bool fits = true;
            for (auto const& [name, place] : inputs) {
                auto const stated = engine.getTensorShape(name.c_str());
                auto const least = engine.getProfileShape(name.c_str(), profile, nvinfer1::OptProfileSelector::kMIN);
                auto const most = engine.getProfileShape(name.c_str(), profile, nvinfer1::OptProfileSelector::kMAX);
                fits = fits && stated.nbDims == place.dims.nbDims;
                for (int i = 0; fits && i < stated.nbDims; ++i) {
                    fits = stated.d[i] >= 0 ? stated.d[i] == place.dims.d[i]
                                            : least.d[i] <= place.dims.d[i] && place.dims.d[i] <= most.d[i];
                }
                size += fits ? volume(most) : 0;
            }
            if (fits && (chosen < 0 || size < smallest)) {
                chosen = profile;
                smallest = size;
            }
        }
        require(chosen >= 0, part + ": no profile of its engine takes " + too_large(engine, inputs) +
                                 "; give fewer tokens or images, or build the model with larger --max-shapes");
        auto& context = contexts_.at(part)[chosen];
        if (context == nullptr) {
            context = engines_.context(part);
            require(context->setOptimizationProfileAsync(chosen, stream_.get()), part + ": no such profile");
        }
        return *context;
    }

    // The inputs that are larger than an engine's largest profile takes.
    static std::string too_large(nvinfer1::ICudaEngine const& engine, std::map<std::string, Place> const& inputs) {
        std::string found;
        for (auto const& [name, place] : inputs) {
            auto largest = engine.getProfileShape(name.c_str(), 0, nvinfer1::OptProfileSelector::kMAX);
            for (int profile = 1; profile < engine.getNbOptimizationProfiles(); ++profile) {
                auto const most = engine.getProfileShape(name.c_str(), profile, nvinfer1::OptProfileSelector::kMAX);
                largest = volume(most) > volume(largest) ? most : largest;
            }
            bool larger = false;
            for (int i = 0; i < std::min(largest.nbDims, place.dims.nbDims); ++i) {
                larger = larger || place.dims.d[i] > largest.d[i];
            }
            if (larger) {
                found += (found.empty() ? "" : ", ") + name + " of " + text_of(place.dims) + " (at most " +
                         text_of(largest) + ")";
            }
        }
        return found.empty() ? "inputs of these shapes" : found;
    }

    Json manifest_;
    Stream stream_;
    PartEngines engines_;
    std::map<std::string, std::string> sources_;  // "part.input" -> "part.output"
    std::map<std::string, nvinfer1::ICudaEngine*> loaded_;
    std::map<std::string, std::vector<std::unique_ptr<nvinfer1::IExecutionContext>>> contexts_;
    std::map<std::string, DeviceBuffer> buffers_;
    std::map<std::string, std::size_t> sizes_;
    std::map<std::string, Place> places_;  // by the name of an input of the whole, or "part.output"
};

// The shape of an input in a file: the dimension that may change follows from the file's size.
nvinfer1::Dims shape_in_file(std::string const& name, nvinfer1::Dims dims, std::size_t bytes, std::size_t item,
                             bool batched) {
    if (batched && dims.d[0] < 0) {
        dims.d[0] = 1;
    }
    std::size_t known = item;
    int open = -1;
    for (int i = 0; i < dims.nbDims; ++i) {
        if (dims.d[i] < 0) {
            require(open < 0, name + ": has several dimensions that may change");
            open = i;
        } else {
            known *= static_cast<std::size_t>(dims.d[i]);
        }
    }
    bool const fits = bytes > 0 && known > 0 && (open < 0 ? bytes == known : bytes % known == 0);
    require(fits, name + ": its file holds " + std::to_string(bytes) + " bytes, and the model takes " +
                      (open < 0 ? "" : "a multiple of ") + std::to_string(known));
    if (open >= 0) {
        dims.d[open] = static_cast<std::int64_t>(bytes / known);
    }
    return dims;
}

class Speaker {
 public:
    Speaker(fs::path const& folder, Json manifest) : chain_(folder, std::move(manifest)) {
        for (auto const& name : chain_.names("decoder", "inputs")) {
            auto const dims = chain_.engine("decoder").getTensorShape(name.c_str());
            if (name.rfind("past_key_values.", 0) == 0) {
                require(dims.nbDims == 4 && dims.d[2] > 0,
                        folder.string() + ": " + name + " of its decoder is no cache [batch, heads, capacity, values]");
                in_place_["present." + name.substr(name.find('.') + 1)] = name;
                capacity_ = dims.d[2];
                auto one = dims;
                one.d[0] = 1;
                chain_.give_zeros(name, one, bytes_of(chain_.engine("decoder").getTensorDataType(name.c_str())));
            }
            positions_ = positions_ || name == "position_ids";
            groups_ = groups_ || name == "groups";
        }
        require(!in_place_.empty(), folder.string() + ": its decoder has no caches");
        auto const logits = chain_.engine("decoder").getTensorShape("logits");
        require(logits.nbDims == 3 && logits.d[2] > 0,
                folder.string() + ": its decoder has no logits [batch, tokens, vocabulary]");
        vocabulary_ = logits.d[2];
    }

    std::int64_t capacity() const { return capacity_; }

    // Runs the encoder on files, or on `prompt` where it reads text; returns what the decoder begins with.
    Ids read(std::map<std::string, fs::path> const& files, Ids prompt) {
        auto const& settings = chain_.settings();
        bool const images = settings.contains("image"), text = !images && settings.at("source") == "text";
        require_known(prompt);
        require_inputs(files, text);
        if (text) {
            require(!prompt.empty(), "the text must be token ids separated by white space");
            give_ids("input_ids", prompt);
            give_ids("attention_mask", Ids(prompt.size(), 1));
        }
        for (auto const& part : chain_.encoders()) {
            auto const names = chain_.names(part, "inputs");
            for (auto const& name : names) {
                if (!text && chain_.comes_from_outside(part, name)) {
                    give_file(part, name, files, !images);
                }
            }
            chain_.run(part);
        }
        chain_.stream().wait("the encoder");
        if (images) {
            return with_features(prompt);
        }
        if (text || prompt.empty()) {
            prompt = settings.at("start_tokens").get<Ids>();
            require_known(prompt);
        }
        return prompt;
    }

    // Appends tokens to the caches; returns the likeliest next one.
    std::int64_t append(Ids const& tokens) {
        give_ids("input_ids", tokens);
        give_one("past_length", past_);
        give_one("new_length", static_cast<std::int64_t>(tokens.size()));
        if (positions_) {
            give_positions(tokens);
        }
        if (groups_) {
            give_ids("groups", groups_of(tokens));
        }
        auto const enqueue = [&] {
            if (chain_.has("embed")) {
                chain_.run("embed");
            }
            chain_.run("decoder", in_place_);
            return true;
        };
        // The second step of one token is recorded.
        if (tokens.size() == 1 && ++single_steps_ == 2) {
            graph_.record(chain_.stream(), enqueue);
        }
        if (tokens.size() == 1 && graph_.recorded()) {
            graph_.launch(chain_.stream());
        } else {
            enqueue();
        }
        chain_.stream().wait("the step");
        past_ += static_cast<std::int64_t>(tokens.size());
        auto const type = chain_.engine("decoder").getTensorDataType("logits");
        std::vector<char> row(vocabulary_ * bytes_of(type));
        // Those of the last tokens, the last one's at the end.
        auto const& logits = chain_.output("decoder.logits");
        auto const* last = logits.address + (logits.dims.d[1] - 1) * row.size();
        check(cudaMemcpy(row.data(), last, row.size(), cudaMemcpyDeviceToHost), "logits");
        return likeliest(type, row.data(), vocabulary_);
    }

 private:
    // An image's token may lie behind the vocabulary: features take its place.
    void require_known(Ids const& ids) const {
        auto const& settings = chain_.settings();
        auto const image = settings.contains("image") ? settings.at("image").at("token_id").get<std::int64_t>() : 0;
        for (auto const id : ids) {
            require(id >= 0 && (id < vocabulary_ || id == image),
                    "token " + std::to_string(id) + " is not in the vocabulary");
        }
    }

    // Files are given for inputs of the encoder alone, and for none where it reads `text`.
    void require_inputs(std::map<std::string, fs::path> const& files, bool text) const {
        std::set<std::string> taken;
        for (auto const& part : chain_.encoders()) {
            for (auto const& name : chain_.names(part, "inputs")) {
                if (!text && chain_.comes_from_outside(part, name)) {
                    taken.insert(name);
                }
            }
        }
        for (auto const& entry : files) {
            require(taken.count(entry.first) != 0, entry.first + ": not an input of this model that a file gives");
        }
    }

    void give_file(std::string const& part, std::string const& name, std::map<std::string, fs::path> const& files,
                   bool batched) {
        auto const file = files.find(name);
        require(file != files.end(), part + ": its input " + name + " is missing; add " + name + "=FILE");
        auto const bytes = contents(file->second);
        auto const item = bytes_of(chain_.engine(part).getTensorDataType(name.c_str()));
        auto const dims = chain_.engine(part).getTensorShape(name.c_str());
        chain_.give(name, bytes.data(), shape_in_file(name, dims, bytes.size(), item, batched), item);
        chain_.stream().wait(name);
    }

    // The prompt with an image's token for every one of its features.
    Ids with_features(Ids const& prompt) const {
        auto const& image = chain_.settings().at("image");
        auto const token = image.at("token_id").get<std::int64_t>(), count = image.at("tokens").get<std::int64_t>();
        auto const images = image.at("alone").get<bool>() ? 1 : chain_.output("vision.image_features").dims.d[0];
        auto const named = std::count(prompt.begin(), prompt.end(), token);
        require(named == images || named == images * count,
                "the prompt holds the image token " + std::to_string(token) + " " + std::to_string(named) +
                    " times, and there are " + std::to_string(images) + " images");
        Ids found;
        for (auto const id : prompt) {
            found.insert(found.end(), id == token && named == images ? count : 1, id);
        }
        return found;
    }

    void give_ids(std::string const& name, Ids const& values) {
        // What is copied must last until the step has run.
        auto const& kept = kept_[name] = values;
        nvinfer1::Dims const dims{2, {1, static_cast<std::int64_t>(kept.size())}};
        chain_.give(name, kept.data(), dims, sizeof(std::int64_t));
    }

    void give_one(std::string const& name, std::int64_t value) {
        auto const& kept = kept_[name] = {value};
        chain_.give(name, kept.data(), nvinfer1::Dims{1, {1}}, sizeof(std::int64_t));
    }

    // Time, height and width. A text token has one number for all three; an image's tokens have those of their place,
    // and what follows an image continues behind its longer side.
    void give_positions(Ids const& tokens) {
        auto const& settings = chain_.settings();
        auto const& grid = settings.at("image").at("grid");
        auto const merge = settings.at("merge").get<std::int64_t>();
        auto const height = grid[1].get<std::int64_t>() / merge, width = grid[2].get<std::int64_t>() / merge;
        auto const image = settings.at("image").at("token_id").get<std::int64_t>();
        auto const count = static_cast<std::int64_t>(tokens.size());
        Ids found(3 * count);
        std::int64_t position = past_ + shift_;
        for (std::int64_t at = 0; at < count;) {
            bool const seen = past_ == 0 && tokens[at] == image;
            auto const many = seen ? height * width : 1;
            require(at + many <= count, "the prompt ends within an image");
            for (std::int64_t i = 0; i < many; ++i) {
                found[at + i] = position;
                found[count + at + i] = position + i / width * seen;
                found[2 * count + at + i] = position + i % width * seen;
            }
            position += seen ? std::max(height, width) : 1;
            at += many;
        }
        shift_ = position - past_ - count;
        auto const& kept = kept_["position_ids"] = found;
        chain_.give("position_ids", kept.data(), nvinfer1::Dims{3, {3, 1, count}}, sizeof(std::int64_t));
    }

    // Which tokens see each other in both directions: all of a prompt, or those of one image; -1 for none.
    Ids groups_of(Ids const& tokens) const {
        Ids found(tokens.size(), -1);
        if (past_ != 0) {
            return found;
        }
        if (chain_.settings().at("groups") == "prompt") {
            return Ids(tokens.size(), 0);
        }
        auto const image = chain_.settings().at("image").at("token_id").get<std::int64_t>();
        std::int64_t group = -1;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            if (tokens[i] == image) {
                group += i == 0 || tokens[i - 1] != image;
                found[i] = group;
            }
        }
        return found;
    }

    Chain chain_;
    std::map<std::string, std::string> in_place_;
    std::map<std::string, Ids> kept_;
    Graph graph_;
    std::int64_t capacity_{}, vocabulary_{}, past_{}, shift_{};
    int single_steps_{};
    bool positions_{}, groups_{};
};

int run(int argc, char** argv) {
    require(argc >= 3, "usage: generate_parts FOLDER MAX_NEW_TOKENS [STOP_TOKEN...] [INPUT=FILE...] < token ids");
    auto const most = whole_number("MAX_NEW_TOKENS", argv[2]);
    require(most > 0, "MAX_NEW_TOKENS: expected 1 or more");
    Ids stop;
    std::map<std::string, fs::path> files;
    for (int i = 3; i < argc; ++i) {
        std::string const argument = argv[i];
        auto const at = argument.find('=');
        if (at == std::string::npos) {
            stop.push_back(whole_number("STOP_TOKEN", argv[i]));
        } else {
            files[argument.substr(0, at)] = argument.substr(at + 1);
        }
    }
    Ids const given(std::istream_iterator<std::int64_t>(std::cin), {});
    require(std::cin.eof(), "the prompt must be token ids separated by white space");

    Speaker speaker(argv[1], manifest_of(argv[1], "generate", "this model generates no tokens; see parts.cpp"));
    Ids const prompt = speaker.read(files, given);
    auto length = static_cast<std::int64_t>(prompt.size());
    require(0 < length && length <= speaker.capacity(), "the prompt has " + std::to_string(length) +
                                                            " tokens, and the caches hold " +
                                                            std::to_string(speaker.capacity()));
    std::int64_t token = speaker.append(prompt);
    for (std::int64_t count = 1;; ++count) {
        std::cout << token << std::endl;
        if (count == most || std::find(stop.begin(), stop.end(), token) != stop.end()) {
            return 0;
        }
        if (length == speaker.capacity()) {
            std::cerr << "the caches are full: " << speaker.capacity() << " tokens\n";
            return 0;
        }
        ++length;
        token = speaker.append({token});
    }
}

}  // namespace

int main(int argc, char** argv) { return run_engines::guarded(run, argc, argv); }
