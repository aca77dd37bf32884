"""CausalConvWithState's kernel against float64, on this machine's GPU and on emulated ones."""

import numpy as np
import pytest
import torch
from recurrent_cases import CAUSAL_CONV as OP
from recurrent_cases import CONVOLUTIONS as SHAPES
from recurrent_cases import convolution_inputs as inputs
from recurrent_cases import relative_error

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import STANDARD_OPS

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(host: PluginHost, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> None:
    rng = np.random.default_rng(seed)
    for count, activation in ((4, "silu"), (4, "none"), (2, "swish")):
        tensors = inputs(rng, shape, dtype, count)
        y, present = STANDARD_OPS[OP].reference(*(x.double() for x in tensors), activation=activation)
        given = [x.to(device) for x in tensors]
        with host.session(OP, given, {"activation": activation, "ndim": 1}) as session:
            found = session.run(given)
            assert relative_error(y, found[0].cpu()) <= TOLERANCE[dtype]
            assert torch.equal(found[1].cpu().double(), present)
            if count == 4:  # in place
                found[0].fill_(torch.nan)
                session.enqueue(given, [found[0], given[3]], torch.empty(0, dtype=torch.uint8, device=device))
                assert relative_error(y, found[0].cpu()) <= TOLERANCE[dtype]
                assert torch.equal(given[3].cpu().double(), present)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 2000, 777, 4), (64, 8192, 1, 4)], ids=str)
def test_against_float64(host: PluginHost, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    check(host, shape, dtype, seed, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_emulated(emulated: PluginHost, shape: tuple[int, ...], seed: int) -> None:
    check(emulated, shape, (torch.float16, torch.bfloat16, torch.float32)[seed % 3], seed, "cpu")
