"""Matches the experts of an MoE block: matrices stacked in one constant, or one MLP per expert."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.last_axis import keeps_last_axis
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, constant_integers, ints_attribute, is_op, operand
from trt_nvfp4.graph_passes.patterns.mlp import match_mlp
from trt_nvfp4.graph_passes.subgraphs.parts import Bias, Linear, Mlp, Weight


def match_stacked_linear(node: ir.Node) -> Linear | None:
    """The linear of chosen experts that `node`, a MatMul, computes with weights stacked as [experts, ., .].

    Its `weight` and `bias` hold the stacked constants, with `expert` open; `weight_nodes` lead from the operand of
    `node` back to the constant.
    """
    if not is_op(node, "MatMul"):
        return None
    for index in (0, 1):
        source = _stacked_source(operand(node, index), dimensions=3)
        if source is None:
            continue
        stored, swapped, weight_nodes = source
        tensor = get_const_tensor(stored)
        assert tensor is not None
        casts = [n for n in weight_nodes if n.op_type == "Cast"]
        dtype = ir.DataType(casts[0].attributes["to"].as_int()) if casts else tensor.dtype
        if dtype not in FLOATS:
            return None
        _, rows, columns = tensor.shape.numpy()
        stored_transposed = swapped != (index == 1)  # as a right operand it is [in, out] when multiplied
        shape = (columns, rows) if stored_transposed else (rows, columns)
        weight = Weight(stored, stored_transposed, dtype, 1.0, shape)
        x, nodes = operand(node, 1 - index), [node]
        if index == 0:  # W x with x as a column
            column, squeeze = x.producer(), _only_user(node.outputs[0])
            if not (is_op(column, "Unsqueeze", "Reshape") and is_op(squeeze, "Squeeze", "Reshape")):
                return None
            x, nodes = operand(column, 0), [column, node, squeeze]
        elif is_op(row := x.producer(), "Unsqueeze"):
            x, nodes = operand(row, 0), [row, node]
        y, bias = _after(nodes[-1].outputs[0], shape[0], nodes)
        return Linear(x, y, weight, bias, node, tuple(nodes), weight_nodes)
    return None


def _stacked_source(value: ir.Value, dimensions: int) -> tuple[ir.Value, bool, tuple[ir.Node, ...]] | None:
    """Follows choices, Casts and matrix Transposes back to a constant: (constant, transposed, nodes on the way)."""
    swapped, nodes = False, []
    while get_const_tensor(value) is None:
        node = value.producer()
        if is_op(node, "Transpose"):
            perm = ints_attribute(node, "perm")
            if perm not in ([0, 1, 2], [0, 2, 1], [0, 1]):
                return None
            swapped ^= perm == [0, 2, 1]
        elif is_op(node, "Gather"):
            if node.attributes.get_int("axis", 0) != 0:
                return None
        elif not is_op(node, "GatherND", "Cast", "Identity"):
            return None
        nodes.append(node)
        value = operand(node, 0)
    tensor = get_const_tensor(value)
    if tensor is None or len(tensor.shape) != dimensions or tensor.dtype not in FLOATS:
        return None
    return value, swapped, tuple(nodes)


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = value.uses()
    return next(iter(uses)).node if len(uses) == 1 and not value.is_graph_output() else None


def _after(y: ir.Value, features: int, nodes: list[ir.Node]) -> tuple[ir.Value, Bias | None]:
    """Passes over the reshapes behind a product and the bias of the chosen experts; `nodes` collects them."""
    bias = None
    while (node := _only_user(y)) is not None:
        if is_op(node, "Add") and bias is None:
            index = 1 if node.inputs[0] is y else 0
            source = _stacked_source(operand(node, index), dimensions=2)
            if source is None or source[1] or _last(source[0]) != features:
                break
            bias = Bias(source[0], 1.0)
            nodes.extend(source[2])
        elif node.inputs[0] is not y or not _keeps(node, features):
            break
        nodes.append(node)
        y = node.outputs[0]
    return y, bias


def _last(value: ir.Value) -> int:
    tensor = get_const_tensor(value)
    assert tensor is not None
    return int(tensor.shape.numpy()[-1])


def _keeps(node: ir.Node, features: int) -> bool:
    """`node` is a reshape that provably keeps the last axis."""
    if is_op(node, "Identity") or (is_op(node, "Reshape", "Squeeze", "Unsqueeze") and keeps_last_axis(node, features)):
        return True
    axes = constant_integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return is_op(node, "Squeeze", "Unsqueeze") and axes is not None and all(0 <= axis <= 1 for axis in axes)


def stacked_mlps(stacked: Mapping[ir.Value, Linear], nodes: Iterable[ir.Node]) -> list[tuple[Mlp, str | None]]:
    """The MLPs that the stacked linears among `nodes` form, each standing for all its experts."""
    inside = set(nodes)
    found = [match_mlp(linear, stacked) for linear in stacked.values() if linear.multiply in inside]
    return [match for match in found if match is not None]


def experts_of(stacked: Mlp) -> tuple[Mlp, ...]:
    """The MLP of each expert of a stack."""
    return tuple(
        replace(
            stacked,
            gate=None if stacked.gate is None else _one(stacked.gate, expert),
            up=_one(stacked.up, expert),
            down=_one(stacked.down, expert),
        )
        for expert in range(stack_size(stacked.up))
    )


def stack_size(linear: Linear) -> int:
    """The number of matrices in the constant of a stacked linear."""
    tensor = get_const_tensor(linear.weight.stored)
    assert tensor is not None
    return int(tensor.shape.numpy()[0])


def _one(linear: Linear, expert: int) -> Linear:
    bias = None if linear.bias is None else replace(linear.bias, expert=expert)
    return replace(linear, weight=replace(linear.weight, expert=expert), bias=bias)
