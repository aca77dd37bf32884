"""The description of one way to compute subgraphs; `registry.py` lists the ways."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import onnx
import onnx_ir as ir

from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

#: Replaces subgraphs of one kind together, once their parts have been lowered. The last argument holds the names of the
#: nodes that compute each subgraph so far; it is updated.
Fuse: TypeAlias = Callable[[ir.Graph, Sequence[Any], dict[str, list[str]]], None]


@dataclass(frozen=True)
class EngineLayers:
    """How an engine shows a lowering.

    `name` is the lowering's in manifests, `shown` in reports. `carrier`: the nodes of the rewritten model that compute
    the subgraph, "plugin" nodes, TensorRT's own "trt_moe", or matrix "product"s. A product's layer must read
    `datatypes` as TensorRT spells them: in both operands, in the weight at least, or (`operands` "calibrated") in both
    where its activations are quantized.
    """

    name: str
    shown: str
    carrier: Literal["plugin", "trt_moe", "product"]
    datatypes: tuple[str, ...] = ()
    operands: Literal["both", "weight", "calibrated"] = "weight"


@dataclass(frozen=True)
class Form:
    """How a lowering computes subgraphs of one kind.

    Attributes:
        lower: replaces a subgraph; returns the names of the nodes that compute it.
        op: the operator that replaces a subgraph, "" where none does; or a function of the subgraph.
        unsupported: the Reason why it cannot compute a subgraph that can be replaced; None where it can.
        slow_on: the Reason why it is a bad choice for a subgraph on a target, where a plan may still ask for it.
        fuse: what takes the place of `lower` for subgraphs that are replaced together.
    """

    lower: Callable[[LoweringContext, Any], list[str]] = lambda *_: []
    op: str | Callable[[Any], str] = ""
    unsupported: Callable[[Any], Reason | None] = lambda _: None
    slow_on: Callable[[Any, Capabilities], Reason | None] = lambda *_: None
    fuse: Fuse | None = None


@dataclass(frozen=True)
class Lowering:
    """One way to compute subgraphs. FP8 has two, plugins and Q/DQ nodes; every other decision has one.

    Attributes:
        description: for the header of plan files.
        forms: by kind of subgraph; kinds that it cannot compute are absent.
        capability: the attribute of `Capabilities` that it needs, "" for none; `unsupported_text`: the reason where a
            target does not have it.
        weights: the format that it quantizes weights to; "" for the model's own or another type of 16 bits.
        held: the format of weights that the model brought quantized ("nvfp4" where it has none), or of a layer's parts.
        recipe: the part of a recipe that applies to its NVFP4 weights.
        recipe_statistics: the kinds of statistics that this part needs.
        statistics: the kinds of statistics that it needs beside those of the recipe (see `statistics.collect`).
        ranges: whether it can use, or must have, the largest magnitudes of its inputs.
        functions: what the operators that it puts in compute, for an op and an operator set version.
        weight_bytes, arithmetic: bytes of a weight with its scales, or of a cached number (None: the model's own type),
            and the type that the tensor cores multiply in.
        activations: what its products read, with known ranges and without.
        layers: what verification looks for in the engine; None: nothing.
    """

    decision: Decision
    description: str
    forms: Mapping[str, Form] = field(repr=False)
    capability: str = ""
    unsupported_text: str = "{target} does not compute {decision}"
    weights: Literal["nvfp4", "fp8", ""] = ""
    held: Literal["nvfp4", "fp8", ""] = ""
    recipe: Callable[[Recipe], Recipe] = lambda recipe: recipe
    recipe_statistics: Callable[[Recipe], frozenset[str]] = lambda recipe: recipe.needs
    statistics: frozenset[str] = frozenset()
    ranges: Literal["", "used", "required"] = ""
    functions: Callable[[str, int], list[onnx.FunctionProto]] = lambda *_: []
    weight_bytes: float | None = None
    arithmetic: str = ""
    activations: tuple[str, str] = ("as in the model", "as in the model")
    layers: EngineLayers | None = None

    @property
    def is_plugin(self) -> bool:
        """Whether a plugin computes it."""
        return self.layers is not None and self.layers.carrier == "plugin"

    @property
    def is_nvfp4_plugin(self) -> bool:
        """Whether a plugin with NVFP4 weights computes it."""
        return self.is_plugin and self.weights == "nvfp4"

    @property
    def scales_at_run_time(self) -> bool:
        """Whether activations of unknown range are quantized all the same."""
        return self.is_plugin and bool(self.ranges)

    def meets(self, require: str) -> bool:
        """Whether its weights are at least as small as `require`, "nvfp4" or "fp8"."""
        return "nvfp4" in (self.weights, self.held) or require in (self.weights, self.held)

    def needs(self, recipe: Recipe) -> frozenset[str]:
        """The kinds of statistics that it needs of what its products read, where weights are made by `recipe`."""
        applied = self.recipe_statistics(self.recipe(recipe)) if self.weights == "nvfp4" else frozenset()
        return self.statistics | applied

    def op(self, subgraph: Subgraph) -> str:
        """The operator that replaces `subgraph`, "" where none does."""
        op = self.forms[subgraph.kind].op
        return op if isinstance(op, str) else op(subgraph)

    def lower(self, context: LoweringContext, subgraph: Subgraph) -> list[str]:
        """Replaces `subgraph`; returns the names of the nodes that compute it."""
        return self.forms[subgraph.kind].lower(context, subgraph)

    def unsupported_by(self, capabilities: Capabilities) -> Reason | None:
        """The Reason where the target does not have it, whatever the subgraph."""
        if not self.capability or getattr(capabilities, self.capability):
            return None
        text = self.unsupported_text.format(target=capabilities.target, decision=self.decision)
        return Reason(ReasonCode.TARGET, text)

    def unsupported(self, subgraph: Subgraph) -> Reason | None:
        """The Reason why it cannot compute `subgraph`, whatever the target."""
        if subgraph.kind not in self.forms:
            text = f"{self.decision} computes {', '.join(self.forms)}, and this is of kind {subgraph.kind}"
            return Reason(ReasonCode.KIND_UNSUPPORTED, text)
        if not subgraph.can_be_replaced and self.decision != Decision.KEEP:
            return subgraph.unsupported
        return self.forms[subgraph.kind].unsupported(subgraph)

    def unsuitable(self, subgraph: Subgraph, capabilities: Capabilities) -> Reason | None:
        """The Reason why the target cannot compute `subgraph` so, or only slowly."""
        if (reason := self.unsupported_by(capabilities)) is not None:
            return reason
        if (reason := self.unsupported(subgraph)) is not None:
            return reason
        return self.forms[subgraph.kind].slow_on(subgraph, capabilities)
