"""Conversions of FP4 and FP8 numbers, by an instruction and without: ties, NaN, infinities, on the emulator."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import trt_nvfp4.plugins
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import TARGETS, Gpu, Program, find_toolkit
from trt_nvfp4.plugins.ops.number_formats import e2m1_encode

KERNELS = Path(trt_nvfp4.plugins.__file__).parent / "kernels"
HEADERS = [KERNELS / "ptx" / "e2m1.cuh", KERNELS / "ptx" / "e4m3.cuh", KERNELS / "attention" / "fragments.cuh"]
SOURCE = """
#include <attention/fragments.cuh>
#include <ptx/e2m1.cuh>
__global__ void decode(unsigned const* codes, unsigned* halves) {
    trt_nvfp4::attention::e4m3_pairs(codes[threadIdx.x], halves[2 * threadIdx.x], halves[2 * threadIdx.x + 1]);
}
extern "C" int decode_words(unsigned const* codes, unsigned* halves) {
    decode<<<1, 64>>>(codes, halves);
    return cudaGetLastError();
}
__global__ void encode(float const* x, unsigned* codes) {
    int const i = threadIdx.x;
    codes[i] = trt_nvfp4::ptx::e2m1_encode(x[2 * i], x[2 * i + 1]);
}
extern "C" int encode_pairs(float const* x, unsigned* codes, int pairs) {
    encode<<<1, pairs>>>(x, codes);
    return cudaGetLastError();
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "thor", "rtx-blackwell"])
def test_pairs(seed: int, target: str) -> None:
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    gpu = Gpu(target)
    program = Program.compile(SOURCE, gpu, includes=[KERNELS], depends=HEADERS)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))]
    special = np.array([0, 1e-45, 6, 7, 1e30, np.inf, np.nan], np.float32)
    x = np.concatenate([*near, special, np.random.default_rng(seed).standard_normal(100).astype(np.float32) * 3])
    x = np.concatenate([x, -x]).astype(np.float32)
    codes = np.zeros(len(x) // 2, np.uint32)
    assert program.call("encode_pairs", x, codes, len(codes)) == 0
    counters = gpu.launches[-1].counters
    assert counters is not None
    assert ("cvt" in counters.instructions()) == (target != "h200")
    finite = e2m1_encode(torch.from_numpy(np.nan_to_num(x, nan=0.0, posinf=9, neginf=-9))).numpy()
    found = np.stack([codes & 15, codes >> 4], 1).ravel()
    np.testing.assert_array_equal(found[~np.isnan(x)], finite[~np.isnan(x)])
    assert (found[np.isnan(x)] % 8 == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("ptx", ["sm_80", "sm_90a"])
def test_cached_e4m3_becomes_float16(ptx: str) -> None:
    """All 256 codes; before SM89 by shifts, 2^-8 of the value. NaN stays NaN."""
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    program = Program.compile(SOURCE, Gpu(replace(TARGETS["h200"], arch=ptx)), includes=[KERNELS], depends=HEADERS)
    codes = np.arange(256, dtype=np.uint8)
    halves = np.zeros((64, 2, 2), np.float16)
    assert program.call("decode_words", codes, halves) == 0
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() / (256 if ptx == "sm_80" else 1)
    np.testing.assert_array_equal(halves.swapaxes(1, 2).ravel(), expected)
