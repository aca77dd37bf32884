"""Block scale searches against a brute-force search in float64, and what each one promises to improve."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.recipes import InputStatistics, block_search, mse_sweep
from trt_nvfp4.common import nvfp4

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(seed: int, rows: int, k: int) -> torch.Tensor:
    """Activations whose channels differ in size and depend on each other."""
    return random(seed, rows, k) @ random(seed + 1, k, k) / k**0.5 * random(seed + 2, k).exp()


def distances(block: np.ndarray, scale: float, metric: np.ndarray) -> np.ndarray:
    """For every E4M3 scale, e^T metric e of the errors of rounding `block` to the nearest E2M1 value."""
    found = []
    for code in E4M3:
        values = E2M1 * code * scale
        errors = block - values[np.abs(block[:, None] - values).argmin(1)]
        found.append(errors @ metric @ errors)
    return np.array(found)


def metrics(name: str, statistics: InputStatistics, blocks: int) -> np.ndarray:
    """[blocks, 16, 16]: what the search called `name` minimises, with statistics of 200 rows."""
    if name == "diagonal":
        weights = statistics["mean_square"].double().numpy()
        weights += (0.01 + 1 / 200) * weights.mean()
        return np.stack([np.diag(row) for row in weights.reshape(blocks, 16)])
    if name == "local-hessian":
        grams = statistics["block_gram"].double().numpy()
        return grams + (0.01 + 16 / 200) * np.trace(grams, axis1=1, axis2=2).mean() / 16 * np.eye(16)
    return np.stack([np.eye(16)] * blocks)


@pytest.mark.parametrize("name", ["max", "four-over-six", "mse", "diagonal", "local-hessian"])
def test_scales_are_the_best_of_their_candidates(name: str, seed: int) -> None:
    """Brute force over all E4M3 codes: no candidate beats the choice, and sweeps reach the best of all codes."""
    weight, x = random(seed, 12, 64), correlated(seed, 200, 64)
    weight[0, :16] *= 1e-3
    weight[1, 16:32] = 0
    statistics = InputStatistics.of_rows(x, {"mean_square", "block_gram"})
    packed, scales, tensor_scale = recipes.quantize_weight(weight, name, statistics)
    scale = tensor_scale.double().item()
    codes = scales.view(torch.uint8).numpy()
    reached_best = 0
    for row, block in itertools.product(range(12), range(4)):
        values = weight[row, 16 * block : 16 * block + 16].double().numpy()
        all_distances = distances(values, scale, metrics(name, statistics, 4)[block])
        amax = np.abs(values).max()
        to_6, to_4 = (int(np.float32(amax / t / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)) for t in (6, 4))
        candidates = {"max": [to_6], "four-over-six": [to_6, to_4]}.get(
            name, [min(max(to_6 + offset, 1), 126) for offset in mse_sweep.CODE_OFFSETS]
        )
        chosen = all_distances[codes[row, block]]
        assert chosen <= min(all_distances[candidates]) * (1 + 1e-5) + 1e-30
        reached_best += bool(chosen <= all_distances.min() * (1 + 1e-5))
    if name not in ("max", "four-over-six"):
        assert reached_best >= 36, "the sweep is as wide as it needs to be"
    assert codes[1, 1] == 0
    restored = nvfp4.dequantize(packed, scales, tensor_scale)
    assert restored[1, 16:32].count_nonzero() == 0


def test_max_is_torchao_and_nvfp4_quantize(seed: int) -> None:
    weight = random(seed, 40, 96).bfloat16()
    found = recipes.quantize_weight(weight, "max")
    scales, packed = nvfp4_quantize(weight.float(), per_tensor_scale=found.tensor_scale)
    assert torch.equal(found.packed, packed.view(torch.uint8))
    assert torch.equal(found.block_scales.float(), scales.float().view(40, -1))
    for a, b in zip(found, nvfp4.quantize(weight), strict=True):
        assert torch.equal(a.float(), b.float())


def test_each_refinement_improves_what_it_looks_at(seed: int) -> None:
    weight, x = random(seed + 9, 96, 256), correlated(seed, 1000, 256)
    statistics = InputStatistics.of_rows(x, {"mean_square", "block_gram", "hessian"})

    def errors(recipe: str) -> tuple[float, float]:
        error = nvfp4.dequantize(*recipes.quantize_weight(weight, recipe, statistics)) - weight
        return error.square().sum().item(), (x @ error.T).square().sum().item()

    in_weight = {name: errors(name)[0] for name in ("max", "four-over-six", "mse")}
    assert in_weight["mse"] < in_weight["four-over-six"] < in_weight["max"]
    in_output = [errors(name)[1] for name in ("mse", "local-hessian", "local-hessian+gptq")]
    assert in_output[2] < in_output[1] < in_output[0]
    assert errors("diagonal")[1] < errors("mse")[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(-30, 30), st.sampled_from(["four-over-six", "mse", "local-hessian"]))
def test_any_magnitude_stays_in_the_format(draw: int, exponent: float, name: str) -> None:
    """Scales are finite and not negative, no block is worse than max scaling under the same tensor scale."""
    weight = random(draw, 2, 32) * 2.0**exponent
    weight[0, :16] *= 2.0 ** (draw % 40 - 20)
    statistics = InputStatistics(block_gram=torch.eye(16).expand(2, 16, 16))
    found = recipes.quantize_weight(weight, name, statistics)
    assert (found.block_scales.view(torch.uint8) <= 126).all()

    def error(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        difference = nvfp4.dequantize(packed, scales, scale).double() - weight.double()
        return difference.view(2, 2, 16).square().sum(-1)

    best, plain = error(*found), error(*nvfp4.quantize(weight, found.tensor_scale))
    assert (best <= plain * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["max", "four-over-six", "mse", "diagonal", "local-hessian"])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_blocks_of_zeros(name: str, rows: int, seed: int) -> None:
    """Pruned rows and channels, and zeros of either sign: their scale is 0, and the other blocks' do not change."""
    weight = random(seed, rows, 128)
    weight[:, 32:64] = 0
    weight[:, 64:80] = -0.0
    weight[::3] *= 0
    statistics = InputStatistics.of_rows(random(seed, 40, 128), {"mean_square", "block_gram"})
    found = recipes.quantize_weight(weight, name, statistics, 1e-3)
    zero = (weight.view(rows, 8, 16) == 0).all(-1)
    assert not found.block_scales.view(torch.uint8)[zero].any()
    assert not nvfp4.dequantize(*found)[weight == 0].any()
    alone = [
        recipes.quantize_weight(weight[r : r + 1, 16 * b : 16 * b + 16], name, statistics.blocks(b, 1), 1e-3)
        for r, b in (~zero).nonzero()[:5]
    ]
    if name in ("max", "four-over-six", "mse"):  # which look at nothing but the block
        for one, (r, b) in zip(alone, (~zero).nonzero()[:5], strict=True):
            assert one.block_scales.view(torch.uint8).item() == found.block_scales.view(torch.uint8)[r, b].item()


def test_tiles_make_no_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(seed, 37, 160), correlated(seed, 100, 160)
    statistics = InputStatistics.of_rows(x, {"block_gram"})
    whole = recipes.quantize_weight(weight, "local-hessian", statistics)
    monkeypatch.setattr(block_search, "_CPU_TILE", 1 << 9)
    monkeypatch.setattr(block_search, "_TILE_COLUMNS", 48)
    tiled = recipes.quantize_weight(weight, "local-hessian", statistics)
    # The order of sums differs, so a near tie may fall to either side.
    assert (whole.block_scales.float() == tiled.block_scales.float()).float().mean() > 0.98


def test_gate_and_up_share_a_tensor_scale(seed: int) -> None:
    gate, up = random(seed, 32, 64), 5 * random(seed + 1, 32, 64)
    common = recipes.parse("mse").tensor_scale(torch.stack([gate, up]).abs().max())
    for weight in (gate, up):
        found = recipes.quantize_weight(weight, "mse", tensor_scale=common)
        assert found.tensor_scale == common
        assert (nvfp4.dequantize(*found) - weight).norm() < 0.12 * weight.norm()


@pytest.mark.parametrize("name", ["four-over-six", "mse", "diagonal", "local-hessian", "gptq", "local-hessian+gptq"])
def test_one_constant_or_no_activation_is_enough(name: str, seed: int) -> None:
    """Statistics of a single row, of constant rows, of zeros: never worse than twice max scaling's error."""
    weight = random(seed, 200, 64)  # so many outputs that their error is no matter of luck
    bound = 2 * (nvfp4.dequantize(*nvfp4.quantize(weight)) - weight).norm()
    for x in (random(seed, 1, 64), torch.ones(5, 64), torch.zeros(5, 64), random(seed, 5, 64) * (torch.arange(64) < 3)):
        statistics = InputStatistics.of_rows(x, {"mean_square", "block_gram", "hessian"})
        restored = nvfp4.dequantize(*recipes.quantize_weight(weight, name, statistics))
        assert restored.isfinite().all()
        if "gptq" not in name:
            assert (restored - weight).norm() < bound
        if x.any():
            plain = nvfp4.dequantize(*nvfp4.quantize(weight))
            assert (x @ (restored - weight).T).norm() < 1.5 * (x @ (plain - weight).T).norm() + 1e-3


def test_what_is_refused(seed: int) -> None:
    weight = random(seed, 4, 32)
    with pytest.raises(ValueError, match="K a multiple of 16, found shape"):
        recipes.quantize_weight(weight[:, :24], "mse")
    for bad in (torch.nan, torch.inf):
        broken = weight.clone()
        broken[2, 5] = bad
        with pytest.raises(ValueError, match=rf"x\[2, 5\] is {bad}"):
            recipes.quantize_weight(broken, "mse")
    with pytest.raises(ValueError, match="tensor_scale must be one positive, finite number"):
        recipes.quantize_weight(weight, "mse", tensor_scale=0.0)
    with pytest.raises(recipes.recipe.CalibrationError, match=r"'max\+gptq' needs hessian of the input"):
        recipes.quantize_weight(weight, "gptq")
    narrow = InputStatistics.of_rows(random(seed, 9, 16), {"block_gram"})
    with pytest.raises(ValueError, match="statistics of 16 channels for a weight of K = 32"):
        recipes.quantize_weight(weight, "local-hessian", narrow)


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(seed: int) -> None:
    weight, x = random(seed, 64, 256), correlated(seed, 500, 256)
    statistics = InputStatistics.of_rows(x, {"block_gram"})
    for name in ("mse", "local-hessian"):
        cpu = recipes.quantize_weight(weight, name, statistics)
        gpu = recipes.quantize_weight(weight.cuda(), name, statistics)
        assert (cpu.block_scales.float() == gpu.block_scales.float().cpu()).float().mean() > 0.98
