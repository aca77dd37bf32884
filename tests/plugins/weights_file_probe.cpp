// What weights_file.h makes of a file: a line for each tensor, its name, type, shape and the sum of its bytes; or the
// error on standard error. usage: weights_file_probe FILE [DIGEST]
#include <iostream>

#include "weights_file.h"

int main(int argc, char** argv) {
    try {
        trt_nvfp4::WeightsFile file(argv[1], argc > 2 ? argv[2] : "");
        std::cout << file.digest() << '\n';
        for (trt_nvfp4::StoredTensor const& tensor : file.tensors()) {
            uint64_t sum = 0;
            file.read(tensor, [&](char const* bytes, size_t count) {
                for (size_t i = 0; i < count; ++i) sum += static_cast<unsigned char>(bytes[i]);
            });
            std::cout << tensor.name << '|' << tensor.dtype;
            for (int64_t const dim : tensor.shape) std::cout << '|' << dim;
            std::cout << '|' << sum << '\n';
        }
        return 0;
    } catch (std::exception const& error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
