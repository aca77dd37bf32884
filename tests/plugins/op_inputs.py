"""Random inputs of each op at given sizes, with the float64 values of their weights."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nvfp4_reference import Array, Weight


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@dataclass
class Case:
    """Inputs in the op's order, and what the reference needs of them."""

    inputs: list[torch.Tensor]
    weights: list[Weight] = field(default_factory=list)


def random_t(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def float64(x: torch.Tensor) -> Array:
    values: Any = x.double().cpu().numpy()
    return values


def linear(rng: np.random.Generator, m: int, n: int, k: int, dtype: torch.dtype, scale: float = 0.0) -> Case:
    w = Weight.random(rng, n, k)
    x, bias = random_t(rng, (1, m, k), dtype), random_t(rng, (n,), dtype)
    return Case([x, *w.tensors, bias, scalar(scale)], [w])


def gated_mlp(rng: np.random.Generator, m: int, k: int, i: int, h: int, dtype: torch.dtype) -> Case:
    up, down = Weight.random(rng, 2 * i, k), Weight.random(rng, h, i)
    x, up_bias, down_bias = (random_t(rng, shape, dtype) for shape in ((m, k), (2 * i,), (h,)))
    inputs = [x, *up.tensors, up_bias, *down.tensors, down_bias, scalar(0), scalar(0)]
    return Case(inputs, [up, down])


def persistent_mlp(
    rng: np.random.Generator, layers: int, m: int, k: int, i: int, h: int, dtype: torch.dtype, *, gated: int
) -> Case:
    rows = 2 * i if gated else i
    up, down = Weight.random(rng, rows, k, (layers,)), Weight.random(rng, h, i, (layers,))
    shapes = ((m, k), (layers, k), (layers, rows), (layers, h))
    x, norm, up_bias, down_bias = (random_t(rng, shape, dtype) for shape in shapes)
    at_run_time = torch.zeros(layers)
    inputs = [x, norm, *up.tensors, up_bias, *down.tensors, down_bias, at_run_time, at_run_time.clone()]
    return Case(inputs, [up, down])


def fp8_weight(
    rng: np.random.Generator, n: int, k: int, dtype: torch.dtype, lead: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """Every finite E4M3 byte, with scales such that products are near one, and a bias."""
    finite = np.array([code for code in range(256) if code % 128 != 127], np.uint8)
    values = torch.from_numpy(rng.choice(finite, (*lead, n, k))).view(torch.int8)
    scales = torch.from_numpy((0.5 + rng.random((*lead, n))) / (130 * k**0.5)).float()
    return [values, scales, random_t(rng, (*lead, n), dtype)]


def fp8_gated_mlp(
    rng: np.random.Generator, m: int, k: int, i: int, h: int, dtype: torch.dtype, scales: tuple[float, float] = (0, 0)
) -> Case:
    """Hidden values and outputs near one."""
    inputs = [random_t(rng, (m, k), dtype), *fp8_weight(rng, 2 * i, k, dtype), *fp8_weight(rng, h, i, dtype)]
    return Case([*inputs, scalar(scales[0]), scalar(scales[1])])


def fp8_moe(
    rng: np.random.Generator,
    m: int,
    h: int,
    i: int,
    experts: int,
    dtype: torch.dtype,
    scales: tuple[float, float] = (0, 0),
    *,
    gated: int = 1,
    s: int = 16,
) -> Case:
    """Routed as in `moe`, experts as in `fp8_gated_mlp`."""
    factor = 2 if gated else 1
    inputs = [random_t(rng, (m, h), dtype), router_logits(rng, m, experts), torch.zeros(experts)]
    inputs += fp8_weight(rng, factor * i, h, dtype, (experts,)) + fp8_weight(rng, h, i, dtype, (experts,))
    inputs += fp8_weight(rng, factor * s, h, dtype) + fp8_weight(rng, h, s, dtype)
    return Case([*inputs, random_t(rng, (h,), dtype) / h**0.5, scalar(scales[0]), scalar(scales[1])])


def router_logits(rng: np.random.Generator, m: int, experts: int) -> torch.Tensor:
    """That rounding cannot reorder: multiples of 1/64, with ties."""
    return torch.from_numpy(rng.integers(-128, 128, (m, experts)) / np.float32(64)).float()


def given_logits(rng: np.random.Generator, m: int, experts: int, most: int) -> torch.Tensor:
    """Weights of none, one, ... `most` experts, of either sign and zero; the others' logits are -inf, NaN or lowest."""
    logits = rng.choice(np.array([-np.inf, np.nan, np.finfo(np.float32).min], np.float32), (m, experts))
    for token in range(m):
        chosen = rng.permutation(experts)[: token % (most + 1)]
        logits[token, chosen] = rng.standard_normal(len(chosen))
        logits[token, chosen[2:3]] = 0
    return torch.from_numpy(logits)


def moe(
    rng: np.random.Generator, m: int, h: int, i: int, experts: int, dtype: torch.dtype, *, gated: int = 1, s: int = 16
) -> Case:
    """The correction bias is zero."""
    factor = 2 if gated else 1
    up, down = Weight.random(rng, factor * i, h, (experts,)), Weight.random(rng, h, i, (experts,))
    shared_up, shared_down = Weight.random(rng, factor * s, h), Weight.random(rng, h, s)
    biases = [random_t(rng, shape, dtype) for shape in ((experts, factor * i), (experts, h), (factor * s,), (h,), (h,))]
    inputs = [random_t(rng, (m, h), dtype), router_logits(rng, m, experts), torch.zeros(experts)]
    inputs += [*up.tensors, biases[0], *down.tensors, biases[1]]
    inputs += [*shared_up.tensors, biases[2], *shared_down.tensors, biases[3], biases[4] / h**0.5]
    return Case([*inputs, scalar(0), scalar(0)], [up, down, shared_up, shared_down])


def quantize(rng: np.random.Generator, m: int, k: int, dtype: torch.dtype, scale: float = 0.0) -> Case:
    x, residual, norm = (random_t(rng, shape, dtype) for shape in ((m, k), (m, k), (k,)))
    return Case([x, residual, norm, scalar(scale)])
