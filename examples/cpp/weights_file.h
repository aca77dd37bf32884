// Reads the file of plugin weights that engines built with --strip share, without TensorRT or CUDA: safetensors, whose
// metadata hold the digest of its content. The tensors' bytes are read in pieces; they are not hashed here.
// For your own programs, too: one header, C++17.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace trt_nvfp4 {

struct StoredTensor {
    std::string name, dtype;  // I8, F8_E4M3, F16, BF16, F32, I32 or I64
    std::vector<int64_t> shape;
    uint64_t begin, size;  // bytes, from the start of the file
};

// The digest in the name of a stripped engine's network (ICudaEngine::getName); empty for an engine with its weights.
inline std::string weights_digest(std::string const& network) {
    std::string const prefix = "trt_nvfp4.weights:";
    if (network.compare(0, prefix.size(), prefix) != 0) return "";
    std::string const digest = network.substr(prefix.size());
    bool const is_sha256 = digest.size() == 64 && digest.find_first_not_of("0123456789abcdef") == std::string::npos;
    return is_sha256 ? digest : "";
}

// What the file of these weights is called; it lies beside the engine.
inline std::string weights_file_name(std::string const& digest) {
    return "weights-" + digest.substr(0, 16) + ".safetensors";
}

// The JSON of a safetensors header: objects of strings, and of arrays of integers that are not negative.
class HeaderReader {
 public:
    explicit HeaderReader(std::string const& text) : text_(text) {}

    // Calls `entry(key)` for each entry of an object; it reads the value.
    template <typename Entry>
    void object(Entry entry) {
        expect('{');
        if (next() == '}') return expect('}');
        while (true) {
            std::string const key = string();
            expect(':');
            entry(key);
            if (next() == '}') return expect('}');
            expect(',');
        }
    }

    std::string string() {
        expect('"');
        std::string found;
        for (char c = take(); c != '"'; c = take()) found += c == '\\' ? escaped() : std::string(1, c);
        return found;
    }

    std::vector<int64_t> integers() {
        std::vector<int64_t> found;
        expect('[');
        if (next() == ']') return expect(']'), found;
        while (true) {
            found.push_back(integer());
            if (next() == ']') return expect(']'), found;
            expect(',');
        }
    }

    void end() {
        if (next() != '\0') fail();
    }

 private:
    [[noreturn]] void fail() const {
        throw std::runtime_error("its header is not that of such a file, at byte " + std::to_string(at_));
    }
    char next() {
        while (at_ < text_.size() && std::string(" \t\r\n").find(text_[at_]) != std::string::npos) ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    char take() {
        if (at_ == text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20) fail();
        return text_[at_++];
    }
    void expect(char c) {
        if (next() != c) fail();
        ++at_;
    }
    int64_t integer() {
        next();
        uint64_t value = 0;
        size_t const first = at_;
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            if (at_ - first == 18) fail();
            value = value * 10 + static_cast<uint64_t>(text_[at_] - '0');
        }
        if (at_ == first) fail();
        return static_cast<int64_t>(value);
    }
    unsigned hex4() {
        unsigned value = 0;
        for (int i = 0; i < 4; ++i) {
            size_t const digit = std::string("0123456789abcdef").find(static_cast<char>(take() | 0x20));
            if (digit == std::string::npos) fail();
            value = value * 16 + static_cast<unsigned>(digit);
        }
        return value;
    }
    std::string escaped() {
        char const c = take();
        static std::map<char, char> const kinds{{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                                                {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
        if (auto const found = kinds.find(c); found != kinds.end()) return std::string(1, found->second);
        if (c != 'u') fail();
        unsigned code = hex4();
        if (code >= 0xd800 && code < 0xdc00) {  // the first of a pair
            if (take() != '\\' || take() != 'u') fail();
            code = 0x10000 + ((code - 0xd800) << 10) + (hex4() - 0xdc00);
        }
        return utf8(code);
    }
    static std::string utf8(unsigned code) {
        auto const tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
        if (code < 0x80) return {static_cast<char>(code)};
        if (code < 0x800) return {static_cast<char>(0xc0 | code >> 6), tail(0)};
        if (code < 0x10000) return {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
        return {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
    }

    std::string const& text_;
    size_t at_ = 0;
};

class WeightsFile {
 public:
    // Throws std::runtime_error for a file that is none, whose tensors do not fill it one behind the other, or, where
    // `digest` is given, that holds the weights of another model.
    explicit WeightsFile(std::string const& path, std::string const& digest = "") : path_(path) {
        file_.open(path, std::ios::binary | std::ios::ate);
        if (!file_)
            throw std::runtime_error(path + ": cannot be opened; an engine built with --strip needs it beside it");
        auto const size = static_cast<uint64_t>(file_.tellg());
        try {
            read_header(size);
        } catch (std::exception const& error) {
            throw std::runtime_error(path + ": not a file of weights, or a damaged one: " + error.what());
        }
        if (!digest.empty() && digest != digest_) {
            throw std::runtime_error(path + ": holds the weights of another model (digest " + digest_.substr(0, 16) +
                                     "..., expected " + digest.substr(0, 16) + "...)");
        }
    }

    std::string const& digest() const { return digest_; }
    std::vector<StoredTensor> const& tensors() const { return tensors_; }

    // Calls take(bytes, count) with the tensor's bytes, in pieces of at most 16 MiB.
    template <typename Take>
    void read(StoredTensor const& tensor, Take take) {
        std::vector<char> piece(std::min<uint64_t>(tensor.size, 16 << 20));
        file_.seekg(static_cast<std::streamoff>(tensor.begin));
        for (uint64_t left = tensor.size; left > 0;) {
            auto const count = std::min<uint64_t>(left, piece.size());
            if (!file_.read(piece.data(), static_cast<std::streamsize>(count))) {
                throw std::runtime_error(path_ + ": ends before its tensors do");
            }
            take(piece.data(), static_cast<size_t>(count));
            left -= count;
        }
    }

 private:
    void read_header(uint64_t size) {
        unsigned char length_bytes[8];
        file_.seekg(0);
        if (size < 8 || !file_.read(reinterpret_cast<char*>(length_bytes), 8)) throw std::runtime_error("too short");
        uint64_t length = 0;
        for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
        if (length > std::min<uint64_t>(size - 8, 100 << 20)) throw std::runtime_error("its header is longer than it");
        std::string text(length, '\0');
        if (!file_.read(text.data(), static_cast<std::streamsize>(length))) throw std::runtime_error("too short");

        HeaderReader reader(text);
        reader.object([&](std::string const& name) {
            if (name == "__metadata__") {
                reader.object([&](std::string const& key) {
                    std::string const value = reader.string();
                    if (key == "trt_nvfp4.digest") digest_ = value;
                });
                return;
            }
            StoredTensor tensor{name, "", {}, 0, 0};
            std::vector<int64_t> offsets;
            reader.object([&](std::string const& key) {
                if (key == "dtype") {
                    tensor.dtype = reader.string();
                } else if (key == "shape") {
                    tensor.shape = reader.integers();
                } else if (key == "data_offsets") {
                    offsets = reader.integers();
                } else {
                    throw std::runtime_error(name + " has an entry that this program does not know: " + key);
                }
            });
            if (offsets.size() != 2 || offsets[1] < offsets[0]) throw std::runtime_error(name + " has no place in it");
            tensor.begin = static_cast<uint64_t>(offsets[0]);
            tensor.size = static_cast<uint64_t>(offsets[1] - offsets[0]);
            tensors_.push_back(tensor);
        });
        reader.end();
        if (weights_digest("trt_nvfp4.weights:" + digest_).empty()) throw std::runtime_error("it has no digest");
        place(8 + length, size);
    }

    // Offsets become places in the file, which the tensors must fill.
    void place(uint64_t begin, uint64_t size) {
        std::sort(tensors_.begin(), tensors_.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
        uint64_t at = 0;
        for (StoredTensor& tensor : tensors_) {
            if (tensor.size == 0 || tensor.begin != at || tensor.size != bytes_of(tensor)) {
                throw std::runtime_error(tensor.name + " does not lie where its shape says");
            }
            at += tensor.size;
            tensor.begin += begin;
        }
        if (begin + at != size) throw std::runtime_error("its tensors do not fill it");
    }

    static uint64_t bytes_of(StoredTensor const& tensor) {
        static std::map<std::string, uint64_t> const sizes{{"I8", 1},  {"F8_E4M3", 1}, {"F16", 2}, {"BF16", 2},
                                                           {"F32", 4}, {"I32", 4},     {"I64", 8}};
        auto const found = sizes.find(tensor.dtype);
        uint64_t bytes = found == sizes.end() ? 0 : found->second;
        for (int64_t const dim : tensor.shape) {
            auto const size = static_cast<uint64_t>(dim);
            if (size == 0 || bytes > (uint64_t{1} << 62) / size) return 0;  // of no size that a tensor has
            bytes *= size;
        }
        return bytes;
    }

    std::string path_, digest_;
    std::ifstream file_;
    std::vector<StoredTensor> tensors_;
};

}  // namespace trt_nvfp4
