"""FP8 tensors against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from trt_nvfp4.calibration import fp8


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_quantize_against_ml_dtypes(axis: int | None, dtype: torch.dtype, seed: int) -> None:
    x = random(seed, 5, 7, 9).to(dtype)
    x[0] *= 100
    values, scale = fp8.quantize(x, axis=axis)
    wide = x.float().numpy()
    others = None if axis is None else tuple(a for a in range(3) if a != axis % 3)
    expected_scale = np.abs(wide).max(axis=others, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(scale.numpy().ravel(), expected_scale.ravel())
    expected = (wide / expected_scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), expected.view(np.uint8))
    back = fp8.dequantize(values, scale, dtype, axis=axis)
    assert back.dtype == dtype
    torch.testing.assert_close(
        back.float(), torch.from_numpy(expected.astype(np.float32) * expected_scale), rtol=0.01, atol=0
    )


def test_a_given_scale_saturates() -> None:
    values, scale = fp8.quantize(torch.tensor([1e4, -1e4, 3.0]), scale=1.0)
    assert values.float().tolist() == [448.0, -448.0, 3.0]
    assert scale.item() == 1.0


def test_zero_channels_stay_zero() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    values, scale = fp8.quantize(x, axis=0)
    assert scale.tolist() == pytest.approx([2.0**-126, 2 / 448])
    torch.testing.assert_close(fp8.dequantize(values, scale, axis=0), x)


@pytest.mark.parametrize("axis", [None, 1])
def test_nan_is_refused_with_its_position(axis: int | None) -> None:
    x = torch.ones(3, 4)
    x[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"x\[2, 1\] is nan"):
        fp8.quantize(x, axis=axis)


def test_a_scale_of_another_shape_or_sign_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 positive, finite"):
        fp8.quantize(torch.ones(3, 4), scale=torch.ones(3), axis=1)
    with pytest.raises(ValueError, match="expected 1 positive, finite"):
        fp8.quantize(torch.ones(3, 4), scale=-1.0)
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        fp8.quantize(torch.ones(3, 4), axis=2)
