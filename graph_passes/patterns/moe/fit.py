"""Finds the routing under which the experts of a block give the values that the block computes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import FLOATS
from trt_nvfp4.graph_passes.patterns.moe.probe import Probe
from trt_nvfp4.graph_passes.patterns.moe.routing import Candidate, weights
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp, Routing
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, constant

_TOLERANCE = 1e-3
# By more than this typical tokens differ if the routing is another one; the others need not be computed.
_FAR = 1e-2


class Fit:
    """The results of the block's experts in a probe, to compare the block's values with.

    `exception` says for which samples no routing makes the block's values, where one does for the typical ones.
    """

    def __init__(
        self, probe: Probe, experts: Sequence[Mlp], candidates: Sequence[Candidate], numbers: Sequence[float]
    ) -> None:
        self._probe, self.experts, self._candidates, self._numbers = probe, tuple(experts), candidates, numbers
        self._tokens = torch.from_numpy(probe.samples.tokens).double()
        self._logits = torch.from_numpy(probe.samples.logits).double()
        self._scales = torch.from_numpy(probe.samples.scales)
        self._typical = torch.from_numpy(probe.samples.typical)
        self._sums: dict[tuple[Routing, int], torch.Tensor] = {}
        self.exception: str | None = None

    def routing(self, y: torch.Tensor) -> Routing | None:
        """The routing that makes `y`, the weighted sum of chosen experts."""
        for candidate in self._candidates:
            typical = (self._typical & candidate.settled).nonzero()[:, 0]
            if len(typical) == 0:
                continue
            routed = self._routed(candidate, typical)
            if routed.numel() == 0:  # it weighs none of them
                continue
            if y.shape != (len(self._tokens), routed.shape[1]):
                return None
            factor = float((y[typical] * routed).sum() / (routed**2).sum().clamp_min(1e-30))
            if not factor > 0 or self._differ(y, routed * factor, typical, _FAR).any():
                continue
            settled = candidate.settled.nonzero()[:, 0]
            wrong = self._differ(y, self._routed(candidate, settled) * factor, settled) | ~candidate.agrees[settled]
            if wrong.any():
                if self.exception is None and not wrong[self._typical[settled]].any():
                    self.exception = self._probe.samples.cases[int(settled[wrong][0])]
                continue
            factor = self._exact(factor)
            if factor == 1.0 or not candidate.routing.scale_input:
                return replace(candidate.routing, scaling_factor=factor)
        return None

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Equal for all samples up to float32's rounding in the probe, NaN to NaN."""
        a, b = (torch.nan_to_num(each, nan=0.0, posinf=0.0, neginf=0.0) for each in (a, b))
        return a.shape == b.shape and not self._differ(a, b, torch.arange(len(b))).any()

    def _differ(
        self, a: torch.Tensor, b: torch.Tensor, samples: torch.Tensor, tolerance: float = _TOLERANCE
    ) -> torch.Tensor:
        """Those of `samples` (their numbers) for which a [tokens, features] differs from b, which holds only
        their rows, by what counts among those of their scale."""
        differ, difference = torch.ones(len(b), dtype=torch.bool), (a[samples] - b).abs()
        for scale in set(self._scales[samples].tolist()):
            rows = self._scales[samples] == scale
            differ[rows] = ~(difference[rows].amax(1) <= tolerance * b[rows].abs().max())
        return differ

    def _routed(self, candidate: Candidate, samples: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts for each of `samples` (their numbers): [samples, features].

        Those are all settled samples of the candidate, or the typical ones among them: their number tells which.
        """
        routing, key = candidate.routing, (candidate.routing, len(samples))
        if key in self._sums:
            return self._sums[key]
        tokens = self._tokens[samples]
        if candidate.given is not None:
            weight = torch.zeros(len(samples), len(self.experts), dtype=torch.float64)
            weight.scatter_(1, *(each[samples] for each in candidate.given))
        else:
            weight = weights(self._logits[samples], routing, candidate.bias)
        total = torch.zeros(0, 0)
        for expert, mlp in enumerate(self.experts):
            rows = weight[:, expert].nonzero()[:, 0]
            if len(rows) == 0:
                continue
            scale = weight[rows, expert, None]
            x = tokens[rows]
            out = self._probe.expert(mlp, x * scale) if routing.scale_input else self._probe.expert(mlp, x) * scale
            total = total if total.numel() else torch.zeros(len(samples), out.shape[1], dtype=torch.float64)
            total[rows] += out
        self._sums[key] = total
        return total

    def _exact(self, factor: float) -> float:
        """The constant of the block, or 1, that was meant by a measured factor."""
        nearest = min((1.0, *self._numbers), key=lambda number: abs(number - factor))
        return nearest if abs(nearest - factor) < _TOLERANCE * factor else factor

    def shared(self, mlp: Mlp, gate: Linear | None) -> torch.Tensor:
        """The output of the shared expert."""
        out = self._probe.expert(mlp, self._tokens)
        return out if gate is None else out * self._probe.sigmoid(gate, self._tokens)


def scaled_experts(experts: Sequence[Mlp], vectors: Iterable[torch.Tensor]) -> Iterator[tuple[Mlp, ...]]:
    """The experts with what each gives times its number, for each of `vectors` [experts] (Gemma 4 has one).

    The number is that of the weight and the bias of `down`.
    """
    for numbers in vectors:
        if numbers.isfinite().all() and (numbers > 0).all():
            yield tuple(_scaled(mlp, number) for mlp, number in zip(experts, numbers.tolist(), strict=True))


def _scaled(mlp: Mlp, factor: float) -> Mlp:
    down = mlp.down
    weight = replace(down.weight, scale=down.weight.scale * factor)
    bias = None if down.bias is None else replace(down.bias, scale=down.bias.scale * factor)
    return replace(mlp, down=replace(down, weight=weight, bias=bias))


def routing_constants(
    nodes: Iterable[ir.Node], experts: int
) -> tuple[list[float], list[tuple[ir.Value, torch.Tensor]]]:
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
