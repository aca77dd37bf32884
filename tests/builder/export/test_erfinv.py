"""The inverse error function that models are exported with: float32's precision, and nothing but what ONNX has."""

import numpy as np
import pytest
import torch

from trt_nvfp4.builder.export.erfinv import erfinv
from trt_nvfp4.builder.export.onnx_arithmetic import onnx_arithmetic


def test_precision() -> None:
    """All over (-1, 1), and where float32 is dense: about 0 and towards 1."""
    one = np.float32(1)
    near_one = one - np.arange(1, 2000, dtype=np.float32) * np.float32(2**-24)
    x = np.concatenate(
        [np.linspace(0, 1, 100_001)[1:-1], near_one, 1 - np.logspace(-7, -1, 5000), np.logspace(-37, -1)]
    )
    x = np.concatenate([x, -x]).astype(np.float32)
    x = torch.tensor(x[np.abs(x) < 1])
    exact = torch.erfinv(x.double())
    assert ((erfinv(x).double() - exact) / exact).abs().max() < 3e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ends(dtype: torch.dtype) -> None:
    x = torch.tensor([-1, 0, 1, 2], dtype=dtype)
    found = erfinv(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.erfinv(x), equal_nan=True)


def test_quantiles_of_the_normal_distribution() -> None:
    probabilities = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0])
    normal = torch.distributions.Normal(0, 1)
    expected, original = normal.icdf(probabilities), torch.erfinv
    with onnx_arithmetic():
        assert torch.erfinv is erfinv
        torch.testing.assert_close(normal.icdf(probabilities), expected)
    assert torch.erfinv is original
