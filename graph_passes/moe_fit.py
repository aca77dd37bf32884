"""Finds the routing under which the experts of a block give the values that the block computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.moe_probe import Probe
from trt_nvfp4.graph_passes.moe_routing import Choice, candidates, compares, settled, weights
from trt_nvfp4.graph_passes.nodes import FLOATS
from trt_nvfp4.graph_passes.subgraph import Linear, Mlp, Routing
from trt_nvfp4.graph_passes.weights import as_torch, constant

_TOLERANCE = 1e-3


class Fit:
    """What the block's experts compute in a probe, to compare the block's values with.

    `exception` says for which samples no routing makes the block's values, where one does for the typical ones.
    """

    def __init__(self, probe: Probe, experts: Sequence[Mlp], nodes: Iterable[ir.Node]) -> None:
        self._probe, self.experts = probe, tuple(experts)
        self._tokens = torch.from_numpy(probe.samples.tokens).double()
        self._logits = torch.from_numpy(probe.samples.logits).double()
        self._scales = torch.from_numpy(probe.samples.scales)
        self._typical = torch.tensor([not case for case in probe.samples.cases])
        self._numbers, self._biases = _constants(nodes, len(experts))
        self._sums: dict[Routing, torch.Tensor] = {}
        self.exception: str | None = None

    def routing(self, choices: Sequence[Choice], keys: torch.Tensor, y: torch.Tensor) -> Routing | None:
        """The routing that makes `y`, the weighted sum of chosen experts; `keys` are what the last choice compares."""
        if keys.numel() != self._logits.numel():
            return None
        keys, typical = keys.reshape(self._logits.shape), self._typical
        for routing, bias in candidates(choices, keys[typical], self._logits[typical], self._biases):
            routed = self._routed(routing, bias)
            if routed.shape != y.shape:
                return None
            clear = settled(self._logits, routing, bias)
            sample = (typical & clear).nonzero()[:, 0]
            factor = float((y[sample] * routed[sample]).sum() / (routed[sample] ** 2).sum().clamp_min(1e-30))
            if not factor > 0:
                continue
            wrong = clear & (self._differ(y, routed * factor) | ~compares(keys, self._logits, routing, bias))
            if wrong.any():
                if self.exception is None and not wrong[sample].any():
                    self.exception = self._probe.samples.cases[int(wrong.nonzero()[0])]
                continue
            factor = self._exact(factor)
            if factor == 1.0 or not routing.scale_input:
                return replace(routing, scaling_factor=factor)
        return None

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Equal for all samples up to float32's rounding in the probe, NaN to NaN."""
        a, b = (torch.nan_to_num(each, nan=0.0, posinf=0.0, neginf=0.0) for each in (a, b))
        return a.shape == b.shape and not self._differ(a, b).any()

    def _differ(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The samples [tokens] of which a and b, [tokens, features], differ by what counts among those of their
        scale."""
        differ = torch.ones(len(b), dtype=torch.bool)
        for scale in set(self._scales.tolist()):
            rows = self._scales == scale
            differ[rows] = ~((a[rows] - b[rows]).abs().amax(1) <= _TOLERANCE * b[rows].abs().max())
        return differ

    def _routed(self, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
        """The weighted sum [tokens, features] of the chosen experts."""
        if routing in self._sums:
            return self._sums[routing]
        weight = weights(self._logits, routing, bias)
        total = torch.zeros(0)
        for expert, mlp in enumerate(self.experts):
            rows = weight[:, expert].nonzero()[:, 0]
            if len(rows) == 0:
                continue
            scale = weight[rows, expert, None]
            x = self._tokens[rows]
            out = self._probe.expert(mlp, x * scale) if routing.scale_input else self._probe.expert(mlp, x) * scale
            total = total if total.numel() else torch.zeros(len(self._tokens), out.shape[1], dtype=torch.float64)
            total[rows] += out
        self._sums[routing] = total
        return total

    def _exact(self, factor: float) -> float:
        """The constant of the block, or 1, that was meant by a measured factor."""
        nearest = min((1.0, *self._numbers), key=lambda number: abs(number - factor))
        return nearest if abs(nearest - factor) < _TOLERANCE * factor else factor

    def shared(self, mlp: Mlp, gate: Linear | None) -> torch.Tensor:
        """What the shared expert adds."""
        out = self._probe.expert(mlp, self._tokens)
        return out if gate is None else out * self._probe.sigmoid(gate, self._tokens)


def scaled_experts(experts: Sequence[Mlp], nodes: Iterable[ir.Node]) -> Iterator[tuple[Mlp, ...]]:
    """The experts with what each gives times its number, for each vector of them that `nodes` read (Gemma 4 has one).

    The number is that of the weight and the bias of `down`.
    """
    for _, numbers in _constants(nodes, len(experts))[1]:
        if numbers.isfinite().all() and (numbers > 0).all():
            yield tuple(_scaled(mlp, number) for mlp, number in zip(experts, numbers.tolist(), strict=True))


def _scaled(mlp: Mlp, factor: float) -> Mlp:
    down = mlp.down
    weight = replace(down.weight, scale=down.weight.scale * factor)
    bias = None if down.bias is None else replace(down.bias, scale=down.bias.scale * factor)
    return replace(mlp, down=replace(down, weight=weight, bias=bias))


def _constants(nodes: Iterable[ir.Node], experts: int) -> tuple[list[float], list[tuple[ir.Value, torch.Tensor]]]:
    """The numbers, and the vectors of one number per expert, that `nodes` read."""
    numbers, vectors = [], {}
    for value in (value for node in nodes for value in node.inputs if value is not None):
        tensor = get_const_tensor(value)
        if tensor is None or tensor.dtype not in FLOATS or tensor.size not in (1, experts):
            continue
        array = as_torch(constant(value)).double().reshape(-1)
        if tensor.size == experts and len(tensor.shape) <= 2:
            vectors[value] = array
        if tensor.size == 1:
            numbers.append(float(array[0]))
    return [number for number in numbers if number > 0], list(vectors.items())
