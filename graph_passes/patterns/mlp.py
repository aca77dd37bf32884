"""Matches MLPs: two linears with an activation between, or three with a gate."""

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand, optional_operand, rank
from trt_nvfp4.graph_passes.patterns.activation import recognize
from trt_nvfp4.graph_passes.patterns.elementwise import region_before
from trt_nvfp4.graph_passes.patterns.give_ups import described, gave_up
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp


def match_mlp(down: Linear, linears: Mapping[ir.Value, Linear]) -> tuple[Mlp, str | None] | None:
    """The MLP that ends in `down`, with the reason why it cannot be replaced or None; None without an MLP.

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

    region = region_before(down.x, is_leaf, features, down.multiply)
    if region is None:
        return None
    recognized = recognize(region)
    if recognized is None:
        leaves = ", ".join(f"'{leaf.name}'" for leaf in region.leaves)
        what = f"what lies between {leaves} and '{down.x.name}' ({region.operators or 'nothing'})"
        gave_up("mlp", down.multiply, f"{what} is neither an activation of one linear nor a gate of two")
        return None
    first = parts[region.leaves[recognized.gate]]
    up = first if recognized.up is None else parts[region.leaves[recognized.up]]
    gate = None if recognized.up is None else first
    if up.x is not first.x:
        why = f"its gate reads {described(first.x)}, and its up projection {described(up.x)}"
        gave_up("mlp", down.multiply, why)
        return None
    nodes = dict.fromkeys((*first.nodes, *up.nodes, *region.nodes, *down.nodes))
    mlp = Mlp(
        x=first.x,
        y=down.y,
        gate=gate,
        up=up,
        down=down,
        activation=recognized.activation,
        nodes=tuple(nodes),
        flattens=region.reshapes and not _takes_matrix(first),
        alpha=recognized.alpha,
        limit=recognized.limit,
    )
    unsupported = recognized.unsupported
    if unsupported is None and region.reshapes and not _takes_matrix(down):
        unsupported = "a Reshape between its linears may change the leading dimensions"
    return mlp, unsupported


def _takes_matrix(linear: Linear) -> bool:
    """Its input has two dimensions, [rows, features]."""
    return linear.multiply.op_type == "Gemm" or rank(linear.x) == 2


def _part_of_linear(value: ir.Value, linears: Mapping[ir.Value, Linear]) -> Linear | None:
    """The part of a fused projection that a Split, Slice or Gather takes, as a linear of its own."""
    node = value.producer()
    if not is_op(node, "Split", "Slice", "Gather"):
        return None
    whole = linears.get(operand(node, 0))
    if whole is None:
        return None
    features = whole.weight.shape[0]
    part = {"Split": _split, "Slice": _slice, "Gather": _gather}[node.op_type](node, value, features)
    dimensions = 2 if whole.multiply.op_type == "Gemm" else rank(whole.y)
    if part is None or part[0] not in (-1, None if dimensions is None else dimensions - 1):
        return None
    rows = part[1]
    count = len(range(*rows.indices(features)))
    return replace(
        whole,
        y=value,
        weight=replace(whole.weight, shape=(count, whole.weight.shape[1]), rows=rows),
        bias=None if whole.bias is None else replace(whole.bias, rows=rows),
        nodes=(*whole.nodes, node),
    )


def _split(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice] | None:
    """Axis and rows of one output."""
    index, count = value.index(), len(node.outputs)
    assert index is not None
    if optional_operand(node, 1) is None:
        sizes = [-(-features // count)] * count
    else:
        sizes = constant_integers(operand(node, 1)) or []
    if len(sizes) != count:
        return None
    start = sum(sizes[:index])
    return node.attributes.get_int("axis", 0), slice(start, min(start + sizes[index], features))


def _slice(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice] | None:
    starts, stops, axes, steps = (constant_integers(optional_operand(node, index)) for index in range(1, 5))
    if len(node.inputs) < 5:
        steps = [1]
    if not (starts and stops and axes and steps) or len(axes) != 1 or steps[0] < 1:
        return None
    return axes[0], slice(*slice(starts[0], stops[0], steps[0]).indices(features))


def _gather(node: ir.Node, value: ir.Value, features: int) -> tuple[int, slice] | None:
    chosen = operand(node, 1)
    indices = constant_integers(chosen) if rank(chosen) == 1 else None  # others change the number of dimensions
    if indices is None or len(indices) < 2 or indices[0] < 0 or indices[1] <= indices[0]:
        return None
    rows = slice(indices[0], indices[-1] + 1, indices[1] - indices[0])
    return (node.attributes.get_int("axis", 0), rows) if list(range(*rows.indices(features))) == indices else None
