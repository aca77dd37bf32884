"""Matches MLPs: two linears with an activation between, or three with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.activation import recognize
from trt_nvfp4.graph_passes.elementwise import region_before
from trt_nvfp4.graph_passes.linear_pattern import attribute, is_op
from trt_nvfp4.graph_passes.subgraph import Linear, Mlp


def match_mlp(down: Linear, linears: Mapping[ir.Value, Linear]) -> tuple[Mlp, str | None] | None:
    """The MLP that ends in `down` and the reason why it cannot be replaced (None if it can), or None if there is none.

    `linears` are all linears of the graph by their output.
    """
    features = down.weight.shape[1]
    parts: dict[ir.Value, Linear] = {}

    def is_leaf(value: ir.Value) -> bool:
        linear = linears.get(value) or _part_of_linear(value, linears)
        if linear is None or linear.weight.shape[0] != features:
            return False
        parts[value] = linear
        return True

    region = region_before(down.x, is_leaf, features)
    if region is None:
        return None
    recognized = recognize(region)
    if recognized is None:
        return None
    first = parts[region.leaves[recognized.gate]]
    up = first if recognized.up is None else parts[region.leaves[recognized.up]]
    gate = None if recognized.up is None else first
    if up.x is not first.x:
        return None  # a gate computed from something else
    nodes = dict.fromkeys((*first.nodes, *up.nodes, *region.nodes, *down.nodes))
    mlp = Mlp(
        x=first.x,
        y=down.y,
        gate=gate,
        up=up,
        down=down,
        activation=recognized.activation,
        nodes=tuple(nodes),
        flattens=region.reshapes and first.multiply.op_type != "Gemm",
        alpha=recognized.alpha,
        limit=recognized.limit,
    )
    refusal = recognized.refusal
    if refusal is None and region.reshapes and down.multiply.op_type != "Gemm":
        refusal = "a Reshape between its linears changes the leading dimensions"
    return mlp, refusal


def _part_of_linear(value: ir.Value, linears: Mapping[ir.Value, Linear]) -> Linear | None:
    """The part of a fused projection that a Split, Slice or Gather takes, as a linear of its own."""
    node = value.producer()
    if not is_op(node, "Split", "Slice", "Gather"):
        return None
    whole = linears.get(node.inputs[0])
    if whole is None:
        return None
    features = whole.weight.shape[0]
    axis, rows = {"Split": _split, "Slice": _slice, "Gather": _gather}[node.op_type](node, value, features)
    rank = 2 if whole.multiply.op_type == "Gemm" else None if whole.y.shape is None else len(whole.y.shape)
    if rows is None or axis not in (-1, None if rank is None else rank - 1):
        return None
    count = len(range(*rows.indices(features)))
    return replace(
        whole,
        y=value,
        weight=replace(whole.weight, shape=(count, whole.weight.shape[1]), rows=rows),
        bias=None if whole.bias is None else replace(whole.bias, rows=rows),
        nodes=(*whole.nodes, node),
    )


def _integers(value: ir.Value | None) -> list[int] | None:
    tensor = None if value is None else get_const_tensor(value)
    return None if tensor is None else [int(number) for number in np.asarray(tensor.numpy()).reshape(-1)]


def _split(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice | None]:
    axis = int(attribute(node, "axis", 0))  # type: ignore[call-overload]
    sizes = _integers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if sizes is None:
        each = -(-features // len(node.outputs))
        sizes = [each] * len(node.outputs)
    index = value.index()
    start = sum(sizes[:index])
    return axis, slice(start, min(start + sizes[index], features))


def _slice(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice | None]:
    inputs = [_integers(operand) for operand in node.inputs[1:]]
    if len(inputs) < 3 or any(operand is None or len(operand) != 1 for operand in inputs):
        return 0, None
    (start,), (stop,), (axis,) = inputs[:3]  # type: ignore[misc]
    step = inputs[3][0] if len(inputs) > 3 else 1  # type: ignore[index]
    if step < 1:
        return axis, None
    return axis, slice(*slice(start, stop, step).indices(features))


def _gather(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice | None]:
    axis = int(attribute(node, "axis", 0))  # type: ignore[call-overload]
    indices = _integers(node.inputs[1])
    if indices is None or len(indices) < 2:
        return axis, None
    rows = slice(indices[0], indices[-1] + 1, indices[1] - indices[0])
    same = rows.step > 0 and indices[0] >= 0 and list(range(*rows.indices(features))) == indices
    return axis, rows if same else None
