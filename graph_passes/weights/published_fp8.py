"""Scales that a checkpoint publishes with its FP8 weights: under them the weights round to the very bytes published."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from trt_nvfp4.calibration.checkpoint import without_model
from trt_nvfp4.graph_passes.patterns.names import module_path
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Weight
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX

# Keys of a stored weight's `meta`: a scale for each row of W, float32 [N]; the scale of what it is multiplied with.
_ROWS, _INPUT = "trt_nvfp4.fp8_scales", "trt_nvfp4.fp8_input_scale"


@dataclass(frozen=True)
class PublishedFP8:
    """By module: the scale of each row of its weight, float32 [N], and that of its input where there is one; `unusable`
    ones are 0, negative, infinite or NaN."""

    rows: Mapping[str, torch.Tensor]
    inputs: Mapping[str, float]
    unusable: Mapping[str, float]

    def attach(self, subgraphs: Iterable[Subgraph], changed: Collection[str] = ()) -> None:
        """Notes the scales at the weights of the subgraphs' linears, but for those of `changed` modules; experts of MoE
        blocks have none."""
        others = set(map(without_model, changed))
        names = {name: module for module in self.rows if (name := without_model(module)) not in others}
        for linear in (linear for part in subgraphs for matrix in part.matrices for linear in matrix):
            module = names.get(without_model(".".join(module_path(linear.multiply))))
            stored = linear.weight.stored
            if module is None:
                module = names.get(without_model((stored.name or "").removesuffix(".weight")))
            if module is not None and len(self.rows[module]) == _stored_rows(linear):
                stored.meta[_ROWS] = self.rows[module]
                if module in self.inputs:
                    stored.meta[_INPUT] = self.inputs[module]


def published_scales(weight: Weight) -> torch.Tensor | None:
    """The scales of the rows of W as it is multiplied, or None."""
    rows = weight.stored.meta.get(_ROWS)
    return None if rows is None or weight.expert is not None or weight.scale <= 0 else rows[weight.rows] * weight.scale


def is_published_in_fp8(subgraph: Subgraph) -> bool:
    """Whether all weights of the subgraph are."""
    return all(published_scales(linear.weight) is not None for linear in subgraph.linears)


def published_ranges(subgraphs: Iterable[Subgraph]) -> dict[str, float]:
    """Largest magnitudes of the tensors that linears multiply, by name, as far as FP8 weights have scales for them."""
    ranges: dict[str, float] = {}
    for linear in (linear for part in subgraphs for linear in part.linears):
        if (scale := linear.weight.stored.meta.get(_INPUT)) is not None:
            ranges[linear.observed] = max(scale * E4M3_MAX, ranges.get(linear.observed, 0.0))
    return ranges


def _stored_rows(linear: Linear) -> int:
    shape = linear.weight.stored.shape
    assert shape is not None
    return shape.numpy()[1 if linear.weight.stored_transposed else 0]
