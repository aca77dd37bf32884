"""AWQ's channel scales against the search written out on activations, not on their statistics."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.recipes import InputStatistics, channel_scales
from trt_nvfp4.calibration.recipes.awq import ALPHAS
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError

AWQ = recipes.parse("mse+awq")


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(seed: int, rows: int, k: int) -> torch.Tensor:
    """Channels of very different size."""
    return random(seed, rows, k) * (0.8 * random(seed + 1, k)).exp()


def output_error(weight: torch.Tensor, x: torch.Tensor, scales: torch.Tensor) -> float:
    """E|W x - W' x'|^2 of the rounded W diag(s) and x / s, block by block of 16 channels, as the search sees it."""
    rounded = nvfp4.dequantize(*recipes.quantize_weight(weight * scales, "mse"))
    blocks = [slice(start, start + 16) for start in range(0, x.shape[1], 16)]
    return sum(
        (x[:, b] @ weight[:, b].T - (x / scales)[:, b] @ rounded[:, b].T).double().square().sum().item() for b in blocks
    )


def test_the_best_of_the_grid(seed: int) -> None:
    weights, x = [random(seed, 32, 128), random(seed + 9, 16, 128)], activations(seed + 1, 500, 128)
    statistics = InputStatistics.of_rows(x, AWQ.needs)
    found = channel_scales([(weight, statistics) for weight in weights], AWQ)
    rms = x.double().square().mean(0).sqrt()
    errors = []
    for alpha in np.arange(20) / 20:
        scales = rms**alpha
        scales = (scales / (scales.max() * scales.min()).sqrt()).float()
        errors.append(sum(output_error(weight, x, scales) for weight in weights))
    error = sum(output_error(weight, x, found) for weight in weights)
    assert error == pytest.approx(min(errors), rel=1e-3)
    assert error < errors[0]  # no scaling


def test_channels_of_one_size_are_left_alone(seed: int) -> None:
    sign = random(seed, 200, 32).sign()
    statistics = InputStatistics.of_rows(sign, AWQ.needs)
    assert torch.equal(channel_scales([(random(seed + 1, 16, 32), statistics)], AWQ), torch.ones(32))


def test_dead_channels_and_inputs(seed: int) -> None:
    """A dead channel's scale stays within what the live ones span; an input that is always zero is not scaled."""
    x = activations(seed, 300, 64)
    x[:, [3, 17]] = 0
    found = channel_scales([(random(seed + 2, 24, 64), InputStatistics.of_rows(x, AWQ.needs))], AWQ)
    assert found.isfinite().all()
    assert (found > 0).all()
    assert found[[3, 17]].max() <= found.max()
    nothing = InputStatistics.of_rows(torch.zeros(10, 64), AWQ.needs)
    assert torch.equal(channel_scales([(random(seed, 24, 64), nothing)], AWQ), torch.ones(64))


def test_one_sample_and_a_constant_input(seed: int) -> None:
    for x in (activations(seed, 1, 32), torch.full((100, 32), 3.0)):
        found = channel_scales([(random(seed + 2, 24, 32), InputStatistics.of_rows(x, AWQ.needs))], AWQ)
        assert found.isfinite().all()
        assert (found > 0).all()


def test_rows_are_sampled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall matrices are searched on some of their rows, which keeps more than half of the gain."""
    weight, x = random(seed, 2048, 32), activations(seed + 1, 200, 32)
    statistics = InputStatistics.of_rows(x, AWQ.needs)
    some = channel_scales([(weight, statistics)], AWQ)
    monkeypatch.setattr("trt_nvfp4.calibration.recipes.awq.SEARCHED_ROWS", 4096)
    every = channel_scales([(weight, statistics)], AWQ)
    before, after = output_error(weight, x, torch.ones(32)), output_error(weight, x, every)
    assert output_error(weight, x, some) < (before + after) / 2


def test_statistics_of_scaled_inputs(seed: int) -> None:
    x, scales = activations(seed, 400, 48), random(seed + 5, 48).exp()
    kinds = ["amax", "channel_amax", "mean_square", "block_gram", "hessian"]
    found = InputStatistics.of_rows(x, [*kinds, "quantized_hessian"]).divided(scales)
    expected = InputStatistics.of_rows(x / scales, kinds)
    for field in fields(InputStatistics):
        value, other = getattr(found, field.name), getattr(expected, field.name)
        assert (value is None) == (other is None), field.name
        if value is None:
            continue
        value, other = torch.as_tensor(value), torch.as_tensor(other)
        if other.ndim > 1:
            # Products of channels: a small one is a difference of large ones, rounded as these are.
            norms = other.diagonal(dim1=-2, dim2=-1).sqrt()
            value, other = (products / (norms.unsqueeze(-1) * norms.unsqueeze(-2)) for products in (value, other))
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6)


def test_missing_statistics() -> None:
    with pytest.raises(CalibrationError, match="block_gram"):
        channel_scales([(torch.ones(8, 32), InputStatistics(amax=1.0))], AWQ)
    with pytest.raises(CalibrationError, match="'quantized-inputs' needs statistics of the activations that 'awq'"):
        recipes.parse("gptq+quantized-inputs+awq")


def test_the_grid_is_that_of_the_paper() -> None:
    assert ALPHAS[0] == 0
    assert len(ALPHAS) == 20
    assert max(ALPHAS) < 1


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(seed: int) -> None:
    weight, statistics = random(seed, 64, 128), InputStatistics.of_rows(activations(seed + 1, 300, 128), AWQ.needs)
    cpu, gpu = channel_scales([(weight, statistics)], AWQ), channel_scales([(weight.cuda(), statistics)], AWQ)
    assert gpu.is_cuda
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=0.2, atol=0)  # a neighbour on the grid, where two are as good
