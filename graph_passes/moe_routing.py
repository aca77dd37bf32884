"""What a router does with its logits, told from values: which experts it chooses, and how it weighs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.nodes import constant_integers, operand
from trt_nvfp4.graph_passes.subgraph import Routing
from trt_nvfp4.plugins.ops.moe_routing import Scoring, route

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Choice:
    """A TopK of the block: it takes `k` of the last `size` values of `keys`."""

    node: ir.Node
    k: int
    size: int
    keys: ir.Value


def match_choice(node: ir.Node) -> Choice | None:
    """The TopK over the last axis with known k that `node` is."""
    keys, k = operand(node, 0), constant_integers(operand(node, 1))
    if k is None or len(k) != 1 or keys.shape is None or not isinstance(keys.shape[-1], int):
        return None
    largest, axis = (node.attributes.get(name) for name in ("largest", "axis"))
    if (largest is not None and not largest.as_int()) or (
        axis is not None and axis.as_int() not in (-1, len(keys.shape) - 1)
    ):
        return None
    return Choice(node, k[0], keys.shape[-1], keys)


def candidates(
    choices: Sequence[Choice],
    keys: torch.Tensor,
    logits: torch.Tensor,
    biases: Sequence[tuple[ir.Value, torch.Tensor]],
) -> Iterator[tuple[Routing, torch.Tensor | None]]:
    """Every routing that agrees with `keys`, the values [tokens, experts] that the last of `choices` compares.

    `biases` are the constants [experts] around: a routing comes with the values of the one that it adds.
    """
    finite = torch.isfinite(keys) & (keys > -1e30)

    def agrees(scores: torch.Tensor) -> bool:
        return bool(((keys - scores).abs()[finite] < _TOLERANCE * (1 + scores.abs()[finite])).all())

    if not finite.any():
        return
    scorings: list[tuple[str, ir.Value | None, torch.Tensor | None]] = []
    for name, scores in (("softmax", torch.softmax(logits, -1)), ("sigmoid", torch.sigmoid(logits)), ("", logits)):
        added: list[tuple[ir.Value | None, torch.Tensor | None]] = [(None, None), *biases]
        for bias, values in added:
            if agrees(scores if values is None else scores + values):
                names = (name,) if name else ("softmax_of_chosen", "sigmoid_of_chosen")
                scorings += [(each, bias, values) for each in names]
                break
    *others, last = choices
    groups = [(1, 1, 1)]
    for choice in others:
        # The best groups, and the best of each group by which the groups are compared.
        tops = {other.k for other in others if other.size * choice.size == last.size} | {1}
        if last.size % choice.size == 0:
            groups += [(choice.size, choice.k, top) for top in sorted(tops)]
    for (scoring, bias, values), (n_group, topk_group, top), renormalize, scale_input in product(
        scorings, groups, (False, True), (False, True)
    ):
        yield (
            Routing(
                top_k=last.k,
                scoring=scoring,
                renormalize=renormalize,
                n_group=n_group,
                topk_group=topk_group,
                group_score_top=top,
                scale_input=scale_input,
                correction_bias=bias,
            ),
            values,
        )


def weights(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight [tokens, experts] of every expert, 0 for those not chosen."""
    experts, chosen = route(
        logits,
        torch.zeros(logits.shape[1]) if bias is None else bias,
        top_k=routing.top_k,
        scoring=Scoring[routing.scoring.upper()],
        renormalize=routing.renormalize,
        scaling_factor=routing.scaling_factor,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        group_score_top=routing.group_score_top,
    )
    return torch.zeros_like(logits).scatter(1, experts, chosen)
