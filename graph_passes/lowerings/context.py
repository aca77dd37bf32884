"""State that lowerings share while a plan is carried out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights
from trt_nvfp4.graph_passes.weights.quantization import Quantization

# Constants, and what nodes make of them, in the types that they were converted to.
Converted: TypeAlias = dict[tuple[ir.Value, ir.DataType], ir.Value]
# What was quantized to FP8, by the value and whether its scales are behind the product.
Quantized: TypeAlias = dict[tuple[ir.Value, bool], ir.Value]


@dataclass(frozen=True)
class LoweringContext:
    """The model that a plan is carried out on, what is known of it, and what subgraphs made so far and may share.

    `recipe` says how NVFP4 weights are made; `amax` holds largest magnitudes of activations by tensor name;
    `readers` as `weight_readers` gives them; `position` orders the nodes as the graph did before any was replaced.
    """

    model: ir.Model
    recipe: Recipe = field(default_factory=Recipe)
    amax: Mapping[str, float] = field(default_factory=dict)
    statistics: Statistics | None = None
    checkpoint: NVFP4Checkpoint | None = None
    readers: Mapping[ir.Value, Sequence[str]] = field(default_factory=dict)
    position: Mapping[ir.Node, int] = field(default_factory=dict)
    made: MadeWeights = field(default_factory=dict)
    fp8_operands: Quantized = field(default_factory=dict)
    nvfp4_inputs: dict[ir.Value, ir.Value] = field(default_factory=dict)
    converted: Converted = field(default_factory=dict)

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.model.graph

    @property
    def quantization(self) -> Quantization:
        """How NVFP4 weights are made."""
        return Quantization(self.recipe, self.statistics, self.checkpoint, self.readers, self.made)
