"""Matches MoE blocks: a router's linear, the choice of experts (TopK, ArgMax, ArgMin), experts, weighted sum.

What lies between the router's logits and the block's output is recognised by its values (see `probe`), so that
batched, gathered, masked and looped spellings are all covered by one rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.patterns.give_ups import gave_up
from trt_nvfp4.graph_passes.patterns.moe.block import BlockMatcher, UnsupportedMoe
from trt_nvfp4.graph_passes.patterns.moe.context import Context
from trt_nvfp4.graph_passes.patterns.moe.router import logits_of, scored
from trt_nvfp4.graph_passes.patterns.moe.routing import Choice, match_choice
from trt_nvfp4.graph_passes.patterns.moe.selected_weights import ALIASES, Selections
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Moe


def match_moes(
    model: ir.Model, linears: Mapping[ir.Value, Linear], selections: Selections
) -> list[Moe | UnsupportedMoe]:
    """The MoE blocks of the main graph, whose linears with matrices of their own are `linears`.

    A block that is not an MoE by its values counts as unsupported where its choice selects weights by `selections`.

    Raises:
        ModelError: a TopK takes more experts than there are, or picks matrices that are not there.
    """
    choices = [choice for choice in map(match_choice, model.graph) if choice is not None]
    routers: dict[ir.Value, list[Choice]] = {}
    for choice in choices:
        logits = logits_of(choice, linears)
        if logits is not None:
            routers.setdefault(logits, []).append(choice)
    routers = {
        logits: group
        for logits, group in routers.items()
        if any(choice.size == linears[logits].weight.shape[0] for choice in group)
    }
    if not routers:
        return []
    context = Context(model, linears)
    shares = _shares(context, choices, routers)
    routers = {
        logits: [c for c in group if c.size == linears[logits].weight.shape[0] or not _of_a_part(c)]
        for logits, group in routers.items()
        if logits not in shares
    }
    matches = [_match(context, linears[logits], group) for logits, group in routers.items()]
    for (logits, group), match in zip(routers.items(), matches, strict=True):
        if match is None:
            router = f"router '{linears[logits].multiply.name}'"
            gave_up("moe", group[-1].node, f"no experts' MLPs lie between {router} and where its choice is used")
        elif isinstance(match, UnsupportedMoe):
            gave_up("moe", group[-1].node, match.reason)
    found = [match for match in matches if isinstance(match, Moe) or _selects(match, selections)]
    return [*shares.values(), *found]


def _shares(
    context: Context, choices: Iterable[Choice], routers: Mapping[ir.Value, Sequence[Choice]]
) -> dict[ir.Value, Moe]:
    """By the router's logits, blocks of some of its experts, where experts are spread over ranks: a part of the weights
    of all experts stands in for logits, and the rank's experts are chosen by it."""
    found: dict[ir.Value, Moe] = {}
    for choice in choices:
        logits = logits_of(choice, context.linears)
        if logits is None or logits not in routers or not _of_a_part(choice):
            continue
        router = context.linears[logits]
        if choice.size < router.weight.shape[0]:
            match = BlockMatcher(context, router, [choice], router.x, choice.keys, choice.size).match()
            if isinstance(match, Moe):
                found[logits] = match
    return found


def _of_a_part(choice: Choice) -> bool:
    """Whether it chooses by some columns of a table."""
    keys = choice.keys
    while is_op(node := keys.producer(), *ALIASES):
        keys = operand(node, 0)
    return is_op(node, "Slice")


def _selects(match: UnsupportedMoe | None, selections: Selections) -> TypeGuard[UnsupportedMoe]:
    return match is not None and any(selections.selects_weights(choice, match.router.y) for choice in match.choices)


def _match(context: Context, router: Linear, choices: Sequence[Choice]) -> Moe | UnsupportedMoe | None:
    """The block of one router, whose experts read what it reads or else another tensor (Gemma 4's their own norm)."""
    (*_, choice) = (choice for choice in choices if choice.size == router.weight.shape[0])
    logits = scored(choice, router.y)
    count = router.weight.shape[0]
    matcher = BlockMatcher(context, router, choices, router.x, logits, count)
    match = matcher.match()
    if not isinstance(match, Moe) and matcher.other_x is not None:
        match = BlockMatcher(context, router, choices, matcher.other_x, logits, count).match() or match
    return match
