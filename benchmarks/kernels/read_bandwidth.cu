// Reads a buffer once: the ceiling that the benchmarks quote fractions of.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace {

__global__ __launch_bounds__(512) void read_all(uint4 const* data, size_t count, uint32_t* out) {
    constexpr int kInFlight = 8;
    uint32_t mixed = 0;
    size_t const stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += kInFlight * stride) {
        uint4 values[kInFlight] = {};
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            if (i + j * stride < count) values[j] = __ldcs(data + i + j * stride);
        }
#pragma unroll
        for (uint4 const& v : values) mixed ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (mixed == 0x9e3779b9u) *out = mixed;  // keeps the reads
}

}  // namespace

extern "C" int readAll(void const* data, size_t bytes, uint32_t* out, int blocks, cudaStream_t stream) {
    read_all<<<static_cast<unsigned>(blocks), 512, 0, stream>>>(static_cast<uint4 const*>(data), bytes / 16, out);
    return cudaGetLastError();
}
