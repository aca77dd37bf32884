"""How the NVFP4 weights of a subgraph are made: the recipe and what it may know about their inputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import onnx_ir as ir
import torch

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import InputStatistics, Recipe
from trt_nvfp4.calibration.recipes.residual_channels import combined_mean_square, residual_order
from trt_nvfp4.calibration.statistics.statistics import KINDS, Statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.patterns.linear import match_linear
from trt_nvfp4.graph_passes.patterns.moe.experts import match_stacked_linear
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights, Matrix
from trt_nvfp4.graph_passes.weights.nvfp4 import Layout, nvfp4_initializers


@dataclass(frozen=True)
class Quantization:
    """A recipe, the model's statistics where there are any, and a checkpoint that has weights quantized already.

    `readers` are the inputs of all linears that multiply a weight (see `weight_readers`), `made` the weights of
    subgraphs so far.
    """

    recipe: Recipe
    statistics: Statistics | None
    checkpoint: NVFP4Checkpoint | None = None
    readers: Mapping[ir.Value, Sequence[str]] = field(default_factory=dict)
    made: MadeWeights = field(default_factory=dict)

    def initializers(
        self,
        prefix: str,
        parts: Sequence[Sequence[Linear]],
        stacked: bool,
        layout: Layout = Layout.PLUGINS,
        interleaved: bool = True,
        size: tuple[int, int] | None = None,
        columns: Sequence[torch.Tensor | None] | None = None,
        row_orders: Sequence[torch.Tensor | None] | None = None,
        residual: int = 0,
    ) -> tuple[ir.Value, ...]:
        """As `nvfp4_initializers`, of the linears of each matrix; the same ones for the same weights. `columns` and
        `row_orders`: of each matrix (see `Matrix`)."""
        none = [None] * len(parts)
        matrices = [
            Matrix([linear.weight for linear in linears], interleaved, across, down)
            for linears, across, down in zip(parts, columns or none, row_orders or none, strict=True)
        ]
        recipe = self.recipe.for_weights()
        key = (layout, stacked, size, residual, str(recipe), *(matrix.identity for matrix in matrices))
        if key not in self.made:
            inputs = self._inputs(linears[0] for linears in parts)
            self.made[key] = nvfp4_initializers(prefix, matrices, stacked, recipe, inputs, layout, size, residual)
        return self.made[key]

    def residual_order(self, linears: Sequence[Linear], residual: int) -> torch.Tensor:
        """The order of the channels that `linears` read with those last whose residuals are worth most; the same for
        all linears of their weights. Raises CalibrationError without statistics."""
        if self.statistics is None:
            raise CalibrationError("residual channels need statistics: give input samples with --calib-data")
        tensors = dict.fromkeys(name for linear in linears for name in self._tensors(linear, self.statistics))
        parts = [part for name in tensors if (part := self.statistics.of(name)).mean_square is not None]
        if not parts:  # no sample reaches them
            return torch.arange(linears[0].weight.shape[1])
        return residual_order(combined_mean_square(parts), residual)

    def _inputs(self, linears: Iterable[Linear]) -> Iterable[InputStatistics]:
        """Statistics of each linear's input or, where its weight is multiplied with several, of all of them."""
        if self.statistics is None:
            return [InputStatistics() for _ in linears]
        return _Inputs(self.statistics, [self._tensors(linear, self.statistics) for linear in linears])

    def _tensors(self, linear: Linear, statistics: Statistics) -> list[str]:
        """The inputs that the weight is multiplied with, of which as much is known as of the linear's own."""
        own = linear.observed
        kinds = statistics.arrays.get(own, {}).keys()
        alike = [
            name
            for name in self.readers.get(linear.weight.stored, ())
            if name in statistics.amax and kinds <= statistics.arrays.get(name, {}).keys()
        ]
        return alike if own in alike else [own]


def weight_readers(graph: ir.Graph) -> dict[ir.Value, list[str]]:
    """Stored weights, each with the names of the tensors that linears multiply it with."""
    readers: dict[ir.Value, dict[str, None]] = {}
    for linear in filter(None, (match_linear(node) or match_stacked_linear(node) for node in graph)):
        readers.setdefault(linear.weight.stored, {})[linear.observed] = None
    return {stored: list(names) for stored, names in readers.items()}


class _Inputs:
    """Statistics over all tensors of each list, combined on demand: Hessians of a whole model exceed memory."""

    def __init__(self, statistics: Statistics, tensors: Sequence[Sequence[str]]) -> None:
        self._statistics, self._tensors = statistics, tensors

    def __iter__(self) -> Iterator[InputStatistics]:
        return (_combined([self._statistics.of(name) for name in names]) for names in self._tensors)


def _combined(parts: Sequence[InputStatistics]) -> InputStatistics:
    """Over the rows of all `parts`, as many of each; of the kinds that all have."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        values = [getattr(part, kind) for part in parts]
        if kind != "amax" and all(value is not None for value in values):
            largest = kind == "channel_amax"
            found[kind] = reduce(torch.maximum, values) if largest else reduce(torch.add, values) / len(values)
    known = [part.amax for part in parts if part.amax is not None]
    rows = [part.rows for part in parts if part.rows is not None]
    return InputStatistics(sum(rows) if len(rows) == len(parts) else None, max(known, default=None), **found)
