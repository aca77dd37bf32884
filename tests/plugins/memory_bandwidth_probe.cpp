// Reads numbers of devices, and prints for each call the GB/s found and what has been asked for so far. Device d's
// memory runs at d + 1 MHz on 1000 bits; device 9's driver does not say.
#include <iostream>

#include "kernels/device/memory_bandwidth.h"

namespace {
int device = 0, asked = 0;
}

extern "C" {
cudaError_t cudaGetDevice(int* current) {
    *current = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of) {
    ++asked;
    *value = attribute == cudaDevAttrMemoryClockRate ? (of == 9 ? 0 : 1000 * (of + 1)) : 1000;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t) { return ""; }
char const* cudaGetErrorString(cudaError_t) { return ""; }
}

int main() {
    while (std::cin >> device) {
        float bandwidth = -1.0f;
        if (trt_nvfp4::read_memory_bandwidth(bandwidth) != TRT_NVFP4_SUCCESS) return 1;
        std::cout << bandwidth / 1e9f << ' ' << asked << '\n';
    }
}
