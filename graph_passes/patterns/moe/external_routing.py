"""Routings of a kind of their own (Phi-3.5-MoE's): a block's values say which experts are chosen and how they weigh.

The model goes on computing these values, and the op that replaces what follows them takes them as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import FLOATS, rank
from trt_nvfp4.graph_passes.patterns.moe.routing import Candidate
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Routing
from trt_nvfp4.plugins.ops.moe_routing import MAX_TOP_K

_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def routing_values(nodes: Iterable[ir.Node], linears: Iterable[Linear], logits: ir.Value) -> list[ir.Value]:
    """Values of `nodes`, in graph order, that may say which experts are chosen or how they weigh.

    No experts, which `linears` belong to, have a part in them.
    """
    of_experts = {node for linear in linears for node in (linear.multiply, *linear.weight_nodes)}
    values = []
    for node in nodes:
        if node in of_experts or any(value is not None and value.producer() in of_experts for value in node.inputs):
            of_experts.add(node)
            continue
        values += [v for v in node.outputs if v.dtype in (*FLOATS, *_INTEGERS) and _has_choices(v, logits)]
    return values


def _has_choices(value: ir.Value, logits: ir.Value) -> bool:
    """It may have the dimensions of the logits, with chosen experts in place of all."""
    if value.shape is None or rank(value) != rank(logits):
        return False
    k = value.shape[-1]
    return not isinstance(k, int) or 1 <= k <= MAX_TOP_K


def given_candidates(
    values: Sequence[ir.Value], runs: Sequence[Sequence[torch.Tensor]], logits: torch.Tensor
) -> Iterator[Candidate]:
    """Every routing that `values` may give; `runs` holds them for each run of a probe, which drew `logits` [tokens,
    experts] for all runs together.

    The last values come first: what happens to them before, for tokens of a kind that is not probed too, is in them. So
    do those of the most experts, of which others are a part.
    """
    tokens, experts = logits.shape
    chosen: dict[int, list[tuple[ir.Value, torch.Tensor]]] = {}
    weighing: dict[int, list[tuple[ir.Value, torch.Tensor]]] = {}
    for value, results in reversed(list(zip(values, zip(*runs, strict=True), strict=True))):
        if len({result.shape[-1] for result in results}) != 1 or not 1 <= results[0].shape[-1] <= MAX_TOP_K:
            continue
        rows = torch.cat([result.flatten(0, -2) for result in results])
        k = rows.shape[1]
        if len(rows) != tokens:
            continue
        if value.dtype in FLOATS:
            weighing.setdefault(k, []).append((value, rows))
        elif ((rows >= 0) & (rows < experts)).all() and not (rows.sort(1).values.diff(dim=1) == 0).any():
            chosen.setdefault(k, []).append((value, rows.long()))
    everywhere = torch.ones(tokens, dtype=torch.bool)
    for k in sorted(chosen, reverse=True):
        for (indices, numbers), (weights, weight), scale_input in product(
            chosen[k], weighing.get(k, ()), (False, True)
        ):
            routing = Routing(top_k=k, scoring="given", scale_input=scale_input, given=(indices, weights))
            yield Candidate(routing, None, everywhere, everywhere, (numbers, weight))
