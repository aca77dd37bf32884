"""FP8 matrices against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from trt_nvfp4.common import fp8
from trt_nvfp4.plugins.ops.number_formats import e4m3_scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_quantize_against_ml_dtypes(axis: int, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(5, 7, 9, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[0] *= 100
    x.select(axis, 2).zero_()
    wide = x.float().numpy()
    others = tuple(a for a in range(3) if a != axis % 3)
    amax = np.abs(wide).max(axis=others, keepdims=True)
    scale = e4m3_scale(torch.from_numpy(amax.ravel()))
    expected_scale = np.maximum(amax / np.float32(448), np.float32(2.0**-126))
    np.testing.assert_array_equal(scale.numpy(), expected_scale.ravel())
    expected = (wide / expected_scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    values = fp8.quantize(x, scale, axis)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), expected.view(np.uint8))


def test_a_given_scale_saturates() -> None:
    values = fp8.quantize(torch.tensor([[1e4, -1e4, 3.0], [8.0, -1e4, 0.5]]), torch.tensor([1.0, 2.0]), axis=0)
    assert values.float().tolist() == [[448.0, -448.0, 3.0], [4.0, -448.0, 0.25]]
