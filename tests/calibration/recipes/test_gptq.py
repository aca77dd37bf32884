"""GPTQ rounding against the algorithm written out in float64, column by column."""

import ml_dtypes
import numpy as np
import pytest
import torch

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.recipes import InputStatistics
from trt_nvfp4.calibration.recipes.gptq import GPTQ
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(weight: np.ndarray, hessian: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Optimal brain surgery: each column in turn is rounded, the rest follow by the inverse Hessian, from which the
    column is then eliminated. `scales` are per element. Returns the rounded weight, and the blocks as they were when
    their first column was reached."""
    weight, rounded = weight.astype(np.float64), np.zeros(weight.shape)
    reached = weight.copy()
    inverse = np.linalg.inv(hessian)
    for i in range(weight.shape[1]):
        if i % 16 == 0:
            reached[:, i : i + 16] = weight[:, i : i + 16]
        values = E2M1 * scales[:, i : i + 1]
        rounded[:, i] = np.take_along_axis(values, np.abs(weight[:, i : i + 1] - values).argmin(1)[:, None], 1)[:, 0]
        weight = weight - np.outer((weight[:, i] - rounded[:, i]) / inverse[i, i], inverse[i])
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0  # eliminated: never read again, and never divided by
    return rounded, reached


def test_against_float64(seed: int) -> None:
    k = 160  # more than one batch of columns
    weight = random(seed, 24, k)
    # Channels differ by e^2 or so: where a few make up all of the error, there is little that others could make good.
    x = random(seed + 1, 900, k) @ random(seed + 2, k, k) * (random(seed + 3, k) / 2).exp()
    statistics = InputStatistics.of_rows(x, {"hessian"})
    found = recipes.quantize_weight(weight, "mse+gptq", statistics)
    nearest = recipes.quantize_weight(weight, "mse")
    hessian = statistics["hessian"].double().numpy()
    hessian += (0.01 + k / 900) * hessian.diagonal().mean() * np.eye(k)
    scales = np.repeat(found.block_scales.double().numpy(), 16, 1) * found.tensor_scale.double().item()
    expected, reached = reference(weight.numpy(), hessian, scales)
    chosen = recipes.quantize_weight(
        torch.from_numpy(reached).float(), "mse", tensor_scale=found.tensor_scale
    ).block_scales.float()
    assert (found.block_scales.float() == chosen).float().mean() > 0.95
    restored = nvfp4.dequantize(*found)
    # One value that falls to the other side of an edge in float32 moves those after it.
    assert np.isclose(restored.numpy(), expected, rtol=1e-5, atol=1e-7).mean() > 0.97

    def error(rounded: torch.Tensor) -> float:
        return (x @ (rounded - weight).T).square().sum().item()

    assert error(restored) == pytest.approx(error(torch.from_numpy(expected).float()), rel=0.02)
    assert error(restored) < 0.8 * error(nvfp4.dequantize(*nearest))


def test_independent_channels_are_rounded_to_nearest(seed: int) -> None:
    """With a diagonal Hessian there is nothing to make good."""
    weight = random(seed, 16, 64)
    statistics = InputStatistics(hessian=torch.diag(random(seed, 64).exp()))
    for a, b in zip(
        recipes.quantize_weight(weight, "gptq", statistics), recipes.quantize_weight(weight, "max"), strict=True
    ):
        assert torch.equal(a.float(), b.float())


def test_silent_channels_and_zero_blocks(seed: int) -> None:
    """Channels that are always zero are rounded to nearest; blocks that are zero there, such as padding, stay zero."""
    weight, x = random(seed, 16, 64), random(seed + 1, 300, 64) @ random(seed + 2, 64, 64)
    weight[:, 16:32] = 0
    x[:, 16:32] = 0
    x[:, 40:44] = 0
    found = recipes.quantize_weight(weight, "gptq", InputStatistics.of_rows(x, {"hessian"}))
    restored = nvfp4.dequantize(*found)
    assert restored.isfinite().all()
    assert restored[:, 16:32].count_nonzero() == 0
    values = torch.from_numpy(E2M1).float() * found.block_scales[:, 2:3].float() * found.tensor_scale
    errors = (weight[:, 40:44, None] - values[:, None]).abs().amin(-1)
    assert torch.allclose((weight - restored)[:, 40:44].abs(), errors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [16, 64])
def test_few_rows_are_not_fitted(rows: int, seed: int) -> None:
    """An expert may get a small part of the samples: on other rows, making errors good by what few have shown is about
    as good as rounding to nearest at least, not half as much worse."""
    k = 256

    def loss(seed: int) -> float:
        mix = random(seed, k, k) @ torch.diag(random(seed + 1, k).exp()) / k**0.5
        weight, seen, others = random(seed + 2, 64, k), random(seed + 3, rows, k) @ mix, random(seed + 4, 2000, k) @ mix

        def error(recipe: str) -> float:
            statistics = InputStatistics.of_rows(seen, recipes.parse(recipe).needs)
            restored = nvfp4.dequantize(*recipes.quantize_weight(weight, recipe, statistics))
            return (others @ (restored - weight).T).square().sum().item()

        return error("mse+gptq") / error("mse")

    # One by itself comes up to that where one channel is most of `mix`.
    assert np.mean([loss(seed + 5 * i) for i in range(4)]) < 1.15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hessians_that_are_none(bad: float) -> None:
    hessian = torch.eye(32)
    hessian[3, 4] = bad
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        GPTQ(hessian, 0.01)


def test_indefinite_hessians_are_damped_or_refused() -> None:
    hessian = torch.eye(32)
    hessian[0, 1] = hessian[1, 0] = 1.2  # an eigenvalue of -0.2
    codes, _ = GPTQ(hessian, 0.01).round(
        torch.ones(1, 32), torch.tensor(1.0), lambda part, _: torch.ones(1, part.shape[1] // 16)
    )
    assert codes.any()
    hessian[0, 1] = hessian[1, 0] = 9.0
    with pytest.raises(CalibrationError, match="not positive definite"):
        GPTQ(hessian, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mse+gptq", "local-hessian+gptq", "max+gptq+quantized-inputs"])
def test_the_gpu_agrees_with_the_cpu(recipe: str, seed: int) -> None:
    """In what the output loses: one value on the other side of an edge moves those after it."""
    weight, x = random(seed, 64, 256), random(seed + 1, 900, 256) @ random(seed + 2, 256, 256)
    statistics = InputStatistics.of_rows(x, recipes.parse(recipe).needs)
    cpu = nvfp4.dequantize(*recipes.quantize_weight(weight, recipe, statistics))
    gpu = nvfp4.dequantize(*recipes.quantize_weight(weight.cuda(), recipe, statistics))
    assert gpu.is_cuda
    losses = [(x @ (restored - weight).T).square().sum().item() for restored in (cpu, gpu.cpu())]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
