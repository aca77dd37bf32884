"""The search for block scales on the emulator, by one thread as quantizers have it and by the four that share a block
in the epilogues of mma.sync's GEMMs: the bits of the Torch reference."""

from pathlib import Path

import numpy as np
import pytest
import torch

import trt_nvfp4.plugins
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import Gpu, Program, find_toolkit
from trt_nvfp4.plugins.ops.number_formats import E4M3_VALUES, quantize_blocks

KERNELS = Path(trt_nvfp4.plugins.__file__).parent / "kernels"
SOURCE = """
#include <formats/quantize_block.cuh>
#include <ptx/extremum.cuh>
#include <ptx/reduce.cuh>
using namespace trt_nvfp4;
template <int kLanes>
__global__ void search(float const* x, float tensor_scale, int scale_search, unsigned* scales) {
    constexpr int kValues = kBlock / kLanes;
    int const thread = blockIdx.x * 32 + threadIdx.x;
    float values[kValues];
    unsigned amax_bits = 0;
    for (int i = 0; i < kValues; ++i) {
        values[i] = x[thread * kValues + i];
        amax_bits = max(amax_bits, ptx::magnitude_bits(values[i]));
    }
    for (int offset = 1; offset < kLanes; offset *= 2) {
        amax_bits = max(amax_bits, __shfl_xor_sync(0xffffffffu, amax_bits, offset));
    }
    BlockQuantizer quantizer(amax_bits, tensor_scale);
    ScaleCandidates const candidates(amax_bits, tensor_scale, quantizer.block_scale, scale_search);
    quantizer.search<kLanes, kValues>(candidates, values);
    if (thread % kLanes == 0) scales[thread / kLanes] = quantizer.block_scale;
}
extern "C" int search_scales(float const* x, float tensor_scale, int scale_search, unsigned* scales, int blocks,
                             int lanes) {
    if (lanes == 1) search<1><<<blocks / 32, 32>>>(x, tensor_scale, scale_search, scales);
    if (lanes == 4) search<4><<<blocks / 8, 32>>>(x, tensor_scale, scale_search, scales);
    return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def program() -> Program:
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    headers = [KERNELS / "formats" / "quantize_block.cuh", KERNELS / "formats" / "scale_search.cuh"]
    return Program.compile(SOURCE, Gpu("rtx-blackwell"), includes=[KERNELS], depends=headers)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("scale_search", [1, 2])
def test_bits(program: Program, seed: int, scale_search: int, lanes: int) -> None:
    """Block scales from none to beyond the largest, zeros, NaN, infinities, and multipliers beyond float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((256, 16)).astype(np.float32)
    x[:127] *= (np.array(E4M3_VALUES) * 6 / np.abs(x[:127]).max(1))[:, None].astype(np.float32)
    x[127:180] *= (10.0 ** rng.integers(-8, 4, (53, 1))).astype(np.float32)
    x[180], x[181, 3], x[182, 7], x[183, 9] = 0, np.nan, np.inf, -np.inf
    for tensor_scale in (1.0, 0.013, 2.0**-126):
        scales = np.zeros(256, np.uint32)
        scaled = (x * np.float32(tensor_scale)).astype(np.float32)
        status = program.call("search_scales", scaled, float(tensor_scale), scale_search, scales, 256, lanes)
        assert status == 0
        _, expected = quantize_blocks(torch.from_numpy(scaled), torch.tensor(tensor_scale), scale_search)
        bits = expected.view(torch.uint8).numpy().ravel()
        is_nan = bits & 127 == 127
        np.testing.assert_array_equal(scales[~is_nan], bits[~is_nan])
        assert (scales[is_nan] & 127 == 127).all()
        assert is_nan.any()
        _, by_amax = quantize_blocks(torch.from_numpy(scaled), torch.tensor(tensor_scale))
        assert (bits != by_amax.view(torch.uint8).numpy().ravel()).any()
