"""How the NVFP4 weights of a subgraph are made: the recipe and what it may know about their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import InputStatistics, Recipe
from trt_nvfp4.calibration.statistics import Statistics
from trt_nvfp4.graph_passes.subgraph import Linear


@dataclass(frozen=True)
class Quantization:
    """A recipe, the model's statistics where there are any, and a checkpoint that has experts quantized already."""

    recipe: Recipe
    statistics: Statistics | None
    checkpoint: NVFP4Checkpoint | None = None

    def inputs(self, linears: Iterable[Linear]) -> list[InputStatistics]:
        """What is known of each linear's input."""
        if self.statistics is None:
            return [InputStatistics() for _ in linears]
        return [self.statistics.of(linear.x.name or "") for linear in linears]
