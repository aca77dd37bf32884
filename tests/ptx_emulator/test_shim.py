"""Host code against the runtime shim: small programs compiled by nvcc, launched in the emulator."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ptx_emulator.errors import EmulatorError, MemoryFault
from ptx_emulator.shim import TARGETS, Gpu, Program, find_toolkit
from ptx_emulator.shim.fatbin import ptx_of
from ptx_emulator.shim.toolkit import keep_source
from ptx_emulator.tensor_map import ElementType, Swizzle

SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

__device__ int bias = 5;
__constant__ float factors[4];

__global__ void scale(const float* a, float* b, char shift, int n, double factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) b[i] = a[i] * float(factor) * factors[i % 4] + bias + shift;
}

__global__ void __launch_bounds__(96) sum_of_cluster(int* out) {
    extern __shared__ int buffer[];
    int rank, blocks;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    buffer[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < blockDim.x; ++i) sum += buffer[i];
        out[blockIdx.x] = 1000 * blocks + 100 * rank + sum;
    }
}

__global__ void out_of_bounds(float* a, int n) { a[n] = 1.0f; }

extern "C" int run_scale(const float* a, float* b, int n, float factor) {
    float host[4] = {1, 2, 3, 4};
    if (auto e = cudaMemcpyToSymbol(factors, host, sizeof(host))) return e;
    scale<<<(n + 63) / 64, 64>>>(a, b, 3, n, factor);
    return cudaGetLastError();
}

extern "C" int run_cluster(int* out, int blocks, int cluster) {
    cudaLaunchAttribute attribute[2];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {unsigned(cluster), 1, 1};
    attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {dim3(blocks), dim3(32), 32 * sizeof(int), nullptr, attribute, 2};
    return cudaLaunchKernelEx(&config, sum_of_cluster, out);
}

// `limit`: of dynamic shared memory; 0: as it is.
extern "C" int run_with_shared(int* out, int blocks, int bytes, int limit) {
    auto const attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (limit > 0) {
        if (auto e = cudaFuncSetAttribute(sum_of_cluster, attribute, limit)) return e;
    }
    sum_of_cluster<<<blocks, 32, bytes>>>(out);
    return cudaGetLastError();
}

extern "C" int run_out_of_bounds(float* a, int n) {
    out_of_bounds<<<1, 1>>>(a, n);
    return cudaGetLastError();
}

extern "C" int device(int* values) {
    cudaDeviceProp p;
    if (auto e = cudaGetDeviceProperties(&p, 0)) return e;
    values[0] = p.major * 10 + p.minor;
    values[1] = p.multiProcessorCount;
    values[2] = p.sharedMemPerBlockOptin;
    cudaFuncAttributes f;
    if (auto e = cudaFuncGetAttributes(&f, sum_of_cluster)) return e;
    values[3] = f.maxThreadsPerBlock;
    if (auto e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&values[4], sum_of_cluster, 128, 0)) return e;
    return cudaFuncSetAttribute(sum_of_cluster, cudaFuncAttributeMaxDynamicSharedMemorySize, p.sharedMemPerBlockOptin);
}

extern "C" int memory() {
    std::vector<int> source(100, 7), target(100);
    int* buffer;
    cudaStream_t stream;
    cudaEvent_t event;
    if (cudaStreamCreate(&stream) || cudaEventCreate(&event)) return 1;
    if (cudaMallocAsync(&buffer, 400, stream)) return 2;
    if (cudaMemcpyAsync(buffer, source.data(), 400, cudaMemcpyHostToDevice, stream)) return 3;
    if (cudaMemsetAsync(buffer + 50, 0, 200, stream) || cudaEventRecord(event, stream)) return 4;
    if (cudaMemcpy(target.data(), buffer, 400, cudaMemcpyDeviceToHost)) return 5;
    if (target[49] != 7 || target[50] != 0) return 6;
    if (cudaMemcpy(buffer, source.data(), 404, cudaMemcpyHostToDevice) != cudaErrorInvalidValue) return 7;
    if (cudaGetLastError() != cudaErrorInvalidValue || cudaGetLastError() != cudaSuccess) return 8;
    cudaPointerAttributes where;
    if (cudaPointerGetAttributes(&where, buffer) || where.type != cudaMemoryTypeDevice) return 9;
    return cudaFree(buffer) || cudaEventDestroy(event) || cudaStreamDestroy(stream);
}

extern "C" int encode(void* tensor, int inner) {
    void* entry;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, 0, &found)) return 1;
    CUtensorMap map;
    cuuint64_t dims[2] = {256, 10}, strides[1] = {512};
    cuuint32_t box[2] = {cuuint32_t(inner), 8}, steps[2] = {1, 1};
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, tensor, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
"""

try:
    find_toolkit()
except EmulatorError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture
def program() -> Program:
    return Program.compile(SOURCE, Gpu("rtx-blackwell"))


def test_triple_chevron_launch_with_symbols(program: Program, seed: int) -> None:
    generator = np.random.default_rng(seed)
    a = generator.normal(size=150).astype(np.float32)
    b = np.zeros(150, np.float32)
    assert program.call("run_scale", a, b, 150, 2.5) == 0
    factors = np.tile(np.float32([1, 2, 3, 4]), 38)[:150]
    np.testing.assert_allclose(b, a * np.float32(2.5) * factors + 8, rtol=1e-6, atol=1e-5)
    (launch,) = program.gpu.launches
    assert (launch.grid, launch.block, launch.cluster) == ((3, 1, 1), (64, 1, 1), None)
    assert launch.parameters[16] == 3
    assert int.from_bytes(launch.parameters[20:24], "little") == 150


def test_cluster_launch(program: Program) -> None:
    out = np.zeros(4, np.int32)
    assert program.call("run_cluster", out, 4, 2) == 0
    assert out.tolist() == [2032, 2132, 2032, 2132]
    assert program.gpu.launches[0].cluster == (2, 1, 1)
    assert program.gpu.launches[0].shared_bytes == 128


def test_launches_that_the_driver_refuses(program: Program) -> None:
    out = np.zeros(2, np.int32)
    assert program.call("run_with_shared", out, 0, 128, 0) == 9  # cudaErrorInvalidConfiguration
    assert program.call("run_with_shared", out, 2, 48 << 10, 0) == 0
    with pytest.raises(EmulatorError, match="has 49152 bytes of dynamic shared memory, launched with 50000"):
        program.call("run_with_shared", out, 2, 50000, 0)
    assert program.call("run_with_shared", out, 2, 50000, 60000) == 0
    # The kernel's from then on, for every launch.
    assert program.call("run_with_shared", out, 2, 60000, 0) == 0
    assert program.call("run_with_shared", out, 2, 128, 1000) == 0
    with pytest.raises(EmulatorError, match="has 1000 bytes"):
        program.call("run_with_shared", out, 2, 50000, 0)
    assert program.call("run_with_shared", out, 2, 128, 1 << 20) == 1  # cudaErrorInvalidValue
    assert (out == 1032).all()


def test_a_fault_in_a_kernel_reaches_the_caller(program: Program) -> None:
    with pytest.raises(MemoryFault):
        program.call("run_out_of_bounds", np.zeros(8, np.float32), 10_000)


@pytest.mark.parametrize("target", ["rtx-blackwell", "thor"])
def test_properties_are_the_targets(target: str) -> None:
    program = Program.compile(SOURCE, Gpu(target))
    values = (ctypes.c_int * 5)()
    assert program.call("device", values) == 0
    expected = TARGETS[target]
    major, minor = expected.capability
    # 128 threads exceed the kernel's launch bounds of 96: no block fits.
    assert list(values) == [10 * major + minor, expected.sm_count, expected.shared_per_block, 96, 0]


def test_memory_streams_and_events(program: Program) -> None:
    assert program.call("memory") == 0


def test_tensor_maps_reach_the_emulators_encoder(program: Program) -> None:
    tensor = np.zeros((10, 256), np.uint16)
    assert program.call("encode", tensor, 64) == 0
    (tensor_map,) = program.gpu.tensor_maps
    assert tensor_map.element_type is ElementType.BFLOAT16
    assert tensor_map.swizzle is Swizzle.B128
    assert (tensor_map.dims, tensor_map.box, tensor_map.strides) == ((256, 10), (64, 8), (512,))
    with pytest.raises(EmulatorError, match="swizzle's 128 bytes"):
        program.call("encode", tensor, 128)


def test_recording_without_executing() -> None:
    program = Program.compile(SOURCE, Gpu("rtx-blackwell", execute=False))
    b = np.full(4, 9, np.float32)
    assert program.call("run_scale", np.zeros(4, np.float32), b, 4, 1.0) == 0
    assert (b == 9).all()
    assert "scale" in program.gpu.launches[0].kernel


def test_a_fat_binary_without_the_architecture(program: Program) -> None:
    b = np.zeros(4, np.float32)
    program.call("run_scale", b, b, 4, 1.0)
    (image,) = program.gpu._modules
    assert ".target sm_120a" in ptx_of(image, (12, 0), {})
    with pytest.raises(EmulatorError, match=r"no PTX for compute capability 90; PTX found for \[120\]"):
        ptx_of(image, (9, 0), {})
    with pytest.raises(EmulatorError, match="no fat binary"):
        ptx_of(ctypes.addressof(ctypes.create_string_buffer(64)), (12, 0), {})


def test_host_buffers_can_be_exposed(program: Program) -> None:
    """A caller that allocates for itself, as a framework on the CPU does."""
    a, b = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    addresses = [ctypes.c_void_p(x.ctypes.data) for x in (a, b)]
    with program.gpu.exposed((a.ctypes.data, a.nbytes), (b.ctypes.data, b.nbytes)):
        assert program.call("run_scale", *addresses, 8, 1.0) == 0
    np.testing.assert_array_equal(b, a * np.tile([1, 2, 3, 4], 2) + 8)
    with pytest.raises(MemoryFault):
        program.call("run_scale", *addresses, 8, 1.0)


MAIN = r"""
#include <cstdio>
#include <cstdlib>
struct Buffer {
    int* data = nullptr;
    ~Buffer() { cudaFree(data); }
} freed_when_the_process_ends;
__global__ void write(int* p, int value) { p[threadIdx.x] = value; }
int main(int argc, char** argv) {
    int *p, host[32];
    cudaMalloc(&p, sizeof(host));
    cudaMalloc(&freed_when_the_process_ends.data, 64);
    write<<<1, std::atoi(argv[2])>>>(p, std::atoi(argv[1]));
    if (cudaMemcpy(host, p, sizeof(host), cudaMemcpyDeviceToHost)) return 9;
    printf("wrote %d\n", host[31]);
    return host[31] == 42 ? 0 : 3;
}
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["42", "32"], 0, "wrote 42"),
        (["7", "32"], 3, "wrote 7"),
        (["42", "64"], 1, "the allocation below is cudaMalloc(128)"),
    ],
)
def test_a_programs_main(arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-m", "ptx_emulator.shim", "thor", str(keep_source(MAIN)), "--", *arguments]
    path = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
