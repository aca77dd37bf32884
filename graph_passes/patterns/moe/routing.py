"""Recognises by values how a router's logits choose experts and weigh them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand
from trt_nvfp4.graph_passes.patterns.moe.probe_inputs import Samples
from trt_nvfp4.graph_passes.subgraphs.parts import Routing
from trt_nvfp4.plugins.ops.moe_routing import Scoring, route, scores_of

_TOLERANCE = 1e-4
# By how much float32 may move a score, and a sum of scores that is a divisor all the same.
_ROUNDING = 1e-6
_SMALLEST_SUM = 1e-3
_POSITIVE = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS)


@dataclass(frozen=True)
class Choice:
    """It takes the `k` largest of the last `size` values of `keys`, or the smallest."""

    node: ir.Node
    k: int
    size: int
    keys: ir.Value
    largest: bool = True

    def __str__(self) -> str:
        return f"node '{self.node.name}' ({self.node.op_type})"


def match_choice(node: ir.Node) -> Choice | None:
    """The TopK with known k, ArgMax or ArgMin over the last axis that `node` is."""
    if not is_op(node, "TopK", "ArgMax", "ArgMin"):
        return None
    is_top_k = node.op_type == "TopK"
    keys, k = operand(node, 0), constant_integers(operand(node, 1)) if is_top_k else [1]
    if k is None or len(k) != 1 or k[0] < 1 or keys.shape is None or not isinstance(keys.shape[-1], int):
        return None
    if node.attributes.get_int("axis", -1 if is_top_k else 0) not in (-1, len(keys.shape) - 1):
        return None
    largest = bool(node.attributes.get_int("largest", 1)) if is_top_k else node.op_type == "ArgMax"
    return Choice(node, k[0], keys.shape[-1], keys, largest)


@dataclass(frozen=True)
class Candidate:
    """A routing that a block may have: on typical tokens it chooses by what the block compares.

    `bias` holds the values of the one that it adds. `agrees` and `settled`, [tokens]: it compares what the block does;
    its weights do not hang on float32's rounding. `given`: the chosen experts and their weights, [tokens, top_k], where
    the block gives them.
    """

    routing: Routing
    bias: torch.Tensor | None
    agrees: torch.Tensor
    settled: torch.Tensor
    given: tuple[torch.Tensor, torch.Tensor] | None = None


def candidates(
    choices: Sequence[Choice],
    keys: torch.Tensor,
    samples: Samples,
    biases: Sequence[tuple[ir.Value, torch.Tensor]],
) -> list[Candidate]:
    """Every routing that agrees with `keys`, the values [tokens, experts] that the last of `choices` compares, for the
    typical tokens.

    `biases` are the constants [experts] around, of which a routing may add one.
    """
    logits, typical = torch.from_numpy(samples.logits).double(), torch.from_numpy(samples.typical)
    if keys.numel() != logits.numel():
        return []
    keys = keys.reshape(logits.shape)
    is_open = ~_closed(keys[typical], positive=True)
    if not is_open.any():
        return []
    scorings: list[tuple[Scoring, ir.Value | None, torch.Tensor | None]] = []
    for scoring in Scoring:
        scores = scores_of(logits[typical], scoring)
        added: list[tuple[ir.Value | None, torch.Tensor | None]] = [(None, None), *biases]
        scorings += [
            (scoring, bias, values)
            for bias, values in added
            if _near(keys[typical], scores if values is None else scores + values)[is_open].all()
        ]
    *others, last = choices
    groups = [(1, 1, 1)]
    for choice in others:
        # The best groups, and the best of each group by which the groups are compared.
        tops = {other.k for other in others if other.size * choice.size == last.size} | {1}
        if last.size % choice.size == 0:
            groups += [(choice.size, choice.k, top) for top in sorted(tops)]
    found = []
    for (scoring, bias, values), (n_group, topk_group, top) in product(scorings, groups):
        routing = Routing(
            top_k=last.k,
            scoring=scoring.name.lower(),
            n_group=n_group,
            topk_group=topk_group,
            group_score_top=top,
            correction_bias=bias,
        )
        agrees = _compares(keys, logits, routing, values)
        for renormalize in (False, True):
            divided = replace(routing, renormalize=renormalize)
            clear = _settled(logits, divided, values)
            if (agrees | ~clear)[typical].all():
                scaling = (replace(divided, scale_input=scale_input) for scale_input in (False, True))
                found += [Candidate(each, values, agrees, clear) for each in scaling]
    return found


def weights(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight [tokens, experts] of every expert, 0 for those not chosen."""
    experts, chosen = _route(logits, routing, bias)
    return torch.zeros_like(logits).scatter(1, experts, chosen)


def _compares(keys: torch.Tensor, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """Whether `keys` [tokens, experts] are what `routing` compares: [tokens]. Closed experts must be the same ones."""
    scoring = _scoring(routing)
    scores = scores_of(logits, scoring)
    expected = (scores if bias is None else scores + bias).masked_fill(~_open(logits, routing, bias), -torch.inf)
    positive = scoring in _POSITIVE and (bias is None or bool((bias >= 0).all()))
    return torch.where(_closed(expected), _closed(keys, positive), _near(keys, expected)).all(1)


def _closed(keys: torch.Tensor, positive: bool = False) -> torch.Tensor:
    """The experts that are masked out of a choice; where all keys are positive, a 0 does that, too (DeepSeek-V2)."""
    return ~torch.isfinite(keys) | (keys < -1e30) | (positive & (keys == 0))


def _settled(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """The tokens whose weights do not hang on float32's rounding, by a near tie or a tiny sum: [tokens]."""
    unmoved = weights(logits, routing, bias)
    stable = torch.ones(len(logits), dtype=torch.bool)
    if routing.renormalize:
        stable = weights(logits, replace(routing, renormalize=False), bias).sum(1).abs() > _SMALLEST_SUM
    chosen = torch.zeros_like(logits).scatter(1, _route(logits, routing, bias)[0], 1.0)
    for taken in (chosen, _open(logits, routing, bias).to(logits.dtype)):
        handicap = _ROUNDING * (1 - 2 * taken)
        moved = weights(logits, routing, handicap if bias is None else bias + handicap)
        stable &= (moved - unmoved).abs().amax(1) <= _TOLERANCE * unmoved.abs().amax(1)
    return stable


def _scoring(routing: Routing) -> Scoring:
    return Scoring[routing.scoring.upper()]


def _near(keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return (keys - scores).abs() < _TOLERANCE * (1 + scores.abs())


def _open(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """The experts [tokens, experts] of the groups that `routing` chooses."""
    count = logits.shape[1] // routing.n_group * routing.topk_group
    experts, _ = _route(logits, replace(routing, top_k=count, renormalize=False), bias)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)


def _route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return route(
        logits,
        torch.zeros(logits.shape[1]) if bias is None else bias,
        top_k=routing.top_k,
        scoring=_scoring(routing),
        renormalize=routing.renormalize,
        scaling_factor=routing.scaling_factor,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        group_score_top=routing.group_score_top,
    )
