"""What quantized-inputs solves, against ridge regression in float64, and what it is for: the error of W4A4."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.recipes import InputStatistics
from trt_nvfp4.calibration.recipes.quantized_inputs import least_squares
from trt_nvfp4.calibration.statistics import statistics as known
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.plugins.ops import number_formats

# Of rows of any rank; head_amax is of caches alone.
KINDS = tuple(kind for kind in known.KINDS if kind != "head_amax")

K = 64


def activations(seed: int, rows: int = 2048) -> torch.Tensor:
    """Correlated channels of very different sizes, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) * torch.logspace(0, -2, K)[:, None]
    return torch.randn(rows, K, generator=generator) @ mix


def seen(x: torch.Tensor) -> torch.Tensor:
    scale = number_formats.tensor_scale(x.abs().max())
    return number_formats.dequantize_blocks(*number_formats.quantize_blocks(x, scale), scale)


@pytest.mark.parametrize("seed", range(3))
def test_least_squares_is_ridge_regression_towards_the_weight(seed: int) -> None:
    x = activations(seed)
    q = seen(x)
    weight = torch.randn(8, K, generator=torch.Generator().manual_seed(seed + 100))
    found = weight @ least_squares(x.T @ q / len(x), q.T @ q / len(q), 0.01)
    strength = (0.01 * q.square().mean(0).mean() * len(q)).sqrt() * torch.eye(K)
    inputs = torch.cat([q, strength]).double()
    outputs = torch.cat([x @ weight.T, strength @ weight.T]).double()
    expected = torch.linalg.lstsq(inputs, outputs).solution.T
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_outputs_of_w4a4_are_nearer(seed: int) -> None:
    x, fresh = activations(seed, 8192).split([4096, 4096])
    weight = torch.randn(48, K, generator=torch.Generator().manual_seed(seed + 100))
    errors = {}
    for recipe in ("max", "local-hessian+gptq", "local-hessian+gptq+quantized-inputs"):
        statistics = InputStatistics.of_rows(x, recipes.parse(recipe).needs)
        quantized = nvfp4.dequantize(*recipes.quantize_weight(weight, recipe, statistics))
        errors[recipe] = (fresh @ weight.T - seen(fresh) @ quantized.T).square().mean().item()
    assert errors["local-hessian+gptq+quantized-inputs"] < 0.97 * errors["local-hessian+gptq"] < 0.97 * errors["max"]


def test_collected_by_onnx_runtime(tmp_path: Path) -> None:
    x = activations(7, 96).numpy()
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["y"])],
        "square",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", K])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    kinds = {"quantized_hessian", "quantized_cross"}
    found = collect(tmp_path / "m.onnx", {"y": kinds}, [{"x": part} for part in np.split(x, 3)]).of("y")
    expected = InputStatistics.of_rows(torch.from_numpy(x * x), kinds)
    for kind in kinds:
        torch.testing.assert_close(found[kind], expected[kind], rtol=1e-4, atol=1e-5)


def test_an_input_that_is_always_zero() -> None:
    """Such as that of an expert that no sample reached: the weight itself is rounded, as without this part."""
    assert torch.equal(least_squares(torch.zeros(K, K), torch.zeros(K, K), 0.01), torch.eye(K))
    weight = torch.randn(8, K, generator=torch.Generator().manual_seed(1))
    silent = InputStatistics.of_rows(torch.zeros(4, K), KINDS)
    found = recipes.quantize_weight(weight, "mse+gptq+quantized-inputs", silent)
    for part, expected in zip(found, recipes.quantize_weight(weight, "mse"), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite(bad: float) -> None:
    with pytest.raises(CalibrationError, match="hold NaN or Inf"):
        least_squares(torch.eye(K), torch.full((K, K), bad), 0.01)
