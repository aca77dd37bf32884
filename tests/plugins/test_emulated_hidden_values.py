"""What the epilogues of W4A4 GEMMs make of sums on the emulator, residual channels included: hidden values in NVFP4 by
one thread a row, as tensor memory gives them, and by the four that share a row of mma.sync's. Bits of the reference."""

from pathlib import Path

import numpy as np
import pytest
import torch

import trt_nvfp4.plugins
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import Gpu, Program, find_toolkit
from trt_nvfp4.plugins.ops.number_formats import pack, quantize_with_residual, tile_scales

KERNELS = Path(trt_nvfp4.plugins.__file__).parent / "kernels"
SOURCE = """
#include <w4a4/w4a4_epilogue.cuh>
using namespace trt_nvfp4;
template <bool kGated, int kLanes>
__global__ void store(float const* sums, W4A4Gemm gemm) {
    int const lane = threadIdx.x % kLanes;
    int64_t const row = blockIdx.y * (32 / kLanes) + threadIdx.x / kLanes, column0 = blockIdx.x * kColumns;
    Fragment<kLanes> values;
    for (int i = 0; i < kColumns / kLanes; ++i) {
        int64_t const column = column0 + fragment_column<kLanes>(i, lane);
        values[i] = row < gemm.m && column < gemm.n ? sums[row * gemm.n + column] : 0.0f;
    }
    HiddenOutput<kGated>::template store<kLanes>(gemm, values, row, column0, lane, 0);
}
extern "C" int hidden(float const* sums, float const* one, void const* bias, float const* scale, uint8_t* packed,
                      uint8_t* block_scales, float* scale_out, int m, int n, int gated, int lanes, int search,
                      int residual) {
    W4A4Gemm gemm{};
    gemm.m = m;
    gemm.n = n;
    gemm.a.tensor_scale = gemm.w.tensor_scale = one;
    gemm.dtype = TRT_NVFP4_FLOAT16;
    gemm.bias = bias;
    gemm.activation = TRT_NVFP4_IDENTITY;
    gemm.hidden = {packed, block_scales, scale_out, nullptr, search, residual};
    gemm.hidden_scale = scale;
    dim3 const grid((n + 127) / 128 * 4, (m + 127) / 128 * 4 * lanes);
    if (gated && lanes == 1) store<true, 1><<<grid, 32>>>(sums, gemm);
    if (gated && lanes == 4) store<true, 4><<<grid, 32>>>(sums, gemm);
    if (!gated && lanes == 1) store<false, 1><<<grid, 32>>>(sums, gemm);
    if (!gated && lanes == 4) store<false, 4><<<grid, 32>>>(sums, gemm);
    return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def program() -> Program:
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    headers = [
        *(KERNELS / "formats").glob("*.cuh"),
        *(KERNELS / "w4a4" / name for name in ("w4a4_epilogue.cuh", "w4a4_gemm.h")),
    ]
    return Program.compile(SOURCE, Gpu("rtx-blackwell"), includes=[KERNELS], depends=headers)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize(
    ("m", "width", "residual", "scale_search"),
    [(5, 96, 0, 2), (5, 96, 32, 2), (3, 64, 64, 0), (130, 240, 16, 0), (2, 80, 48, 1), (1, 16, 16, 0)],
)
def test_bits(
    program: Program, seed: int, gated: int, lanes: int, m: int, width: int, residual: int, scale_search: int
) -> None:
    """Every byte, padding too; zeros, block scales that round to zero, saturation, NaN and infinity."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((m, width)).astype(np.float32)
    hidden[:, : width // 3] = 0
    hidden[0, -1], hidden[0, -16] = 300, 1e-4
    if m > 4:
        hidden[1] *= 1e-6
        hidden[2, -3], hidden[3, -5] = np.nan, -np.inf
    sums = np.repeat(hidden, 2, axis=1) if gated else hidden.copy()
    if gated:
        sums[:, 0::2] = 1  # gates
    scale = np.array([0.02], np.float32)
    stored = width + residual
    packed = np.full((m, stored // 2), 0xAA, np.uint8)
    scales = np.full((-(-m // 128) * 128, -(-stored // 64) * 4), 0xAA, np.uint8)
    bias, one, scale_out = np.zeros(sums.shape[1], np.float16), np.ones(1, np.float32), np.zeros(1, np.float32)
    status = program.call(
        "hidden",
        sums,
        one,
        bias,
        scale,
        packed,
        scales,
        scale_out,
        m,
        sums.shape[1],
        gated,
        lanes,
        scale_search,
        residual,
    )
    assert status == 0
    assert scale_out == scale
    codes, blocks = quantize_with_residual(torch.from_numpy(hidden), torch.tensor(0.02), scale_search, residual)
    np.testing.assert_array_equal(packed, pack(codes).numpy())
    expected = tile_scales(blocks).view(torch.uint8).numpy()
    is_nan = expected & 127 == 127
    np.testing.assert_array_equal(scales[~is_nan], expected[~is_nan])
    assert (scales[is_nan] & 127 == 127).all()
