"""Learned rounding: never worse than GPTQ by the error that both look at, row by row, and better on the whole."""

from __future__ import annotations

import pytest
import torch

from trt_nvfp4.calibration.recipes import InputStatistics, parse, quantize_weight
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError


@pytest.mark.parametrize("scales", ["max", "mse"])
def test_output_error_falls(scales: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(64, 64, generator=generator) / 8 + torch.eye(64)
    x = torch.randn(4000, 64, generator=generator) @ mix
    x[:, ::16] *= 10
    weight = torch.randn(24, 64, generator=generator)
    weight[0] = 0
    weight[1, :16] *= 1e-6  # a block whose scale rounds to 0
    statistics = InputStatistics.of_rows(x, {"hessian", "amax"})
    errors = []
    for recipe in (f"{scales}+gptq", f"{scales}+gptq+learned"):
        restored = nvfp4.dequantize(*quantize_weight(weight, recipe, statistics))
        assert restored.isfinite().all()
        errors.append(((restored - weight).double() @ x.double().T).square().sum(1))
    assert (errors[1] <= errors[0] * 1.02 + 1e-9).all()  # but for the damping
    assert errors[1].sum() < 0.97 * errors[0].sum()


def test_spelling() -> None:
    assert str(parse("learned+gptq")) == "max+gptq+learned"
    assert parse("mse+gptq+learned").needs == {"hessian"}
    with pytest.raises(CalibrationError, match="'learned' is an option of gptq"):
        parse("mse+learned")
