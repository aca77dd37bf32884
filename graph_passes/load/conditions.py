"""Ifs whose condition is known become the branch that they take; what TensorRT needs of the others."""

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common.nested_graphs import bodies
from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, rank, register

# What exporters compute conditions with, from sizes.
_LOGIC = (
    *("And", "Cast", "Equal", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Not", "Or"),
    *("Reshape", "Squeeze", "Unsqueeze"),
)
_BRANCHES = ("else_branch", "then_branch")


def fold_conditions(graph: ir.Graph) -> bool:
    """Puts the nodes of the branch in the place of each If on constants, in place; returns whether there was one."""
    found = False
    pending = list(graph)
    while pending:
        node = pending.pop()
        if is_op(node, "If") and (condition := _known(operand(node, 0))) is not None:
            pending += _take(graph, node, node.attributes[_BRANCHES[bool(condition.reshape(-1)[0])]].as_graph())
            found = True
    return found


def type_branches(proto: onnx.ModelProto) -> None:
    """Gives the outputs of Ifs' branches the shapes that ONNX infers, which it writes nowhere."""
    graph = proto.graph
    known = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    for node in graph.node:
        for body in bodies(node) if node.op_type == "If" else ():
            alone = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=body)
            made = {name for inner in body.node for name in inner.output}
            read = {name for inner in body.node for name in inner.input} | {output.name for output in body.output}
            alone.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
            alone.graph.input.extend(known[name] for name in sorted(read - made) if name in known)
            for output, typed in zip(body.output, onnx.shape_inference.infer_shapes(alone).graph.output, strict=True):
                output.type.CopyFrom(typed.type)


def check_branches(graph: ir.Graph) -> None:
    """Raises ValueError for an If whose branches give an output of different ranks."""
    for node in graph.all_nodes():
        if not is_op(node, "If"):
            continue
        outputs = [node.attributes[branch].as_graph().outputs for branch in _BRANCHES]
        for output, *values in zip(node.outputs, *outputs, strict=True):
            ranks = [rank(value) for value in values]
            if None not in ranks and ranks[0] != ranks[1]:
                raise ValueError(
                    f"node '{node.name}' (If): '{output.name}' has {ranks[1]} dimensions in one branch and {ranks[0]} "
                    "in the other, which TensorRT does not take; export the model with fixed sizes, so that the "
                    "branch is known, or without the Squeeze that makes the difference"
                )


def _known(value: ir.Value) -> np.ndarray | None:
    """The values of a condition that constants give; None for others."""
    if (tensor := get_const_tensor(value)) is not None:
        return np.asarray(tensor.numpy()) if tensor.size == 1 else None
    node = value.producer()
    if not is_op(node, *_LOGIC):
        return None
    operands = [None if operand is None else _known(operand) for operand in node.inputs]
    if any(array is None for array in operands):
        return None
    proto = ir.to_proto(node)
    proto.input[:], proto.output[:] = [f"i{number}" for number in range(len(operands))], ["o"]
    (result,) = ReferenceEvaluator(proto).run(None, dict(zip(proto.input, operands, strict=True)))
    return np.asarray(result)


def _take(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> list[ir.Node]:
    """The nodes of a branch, moved to where the If was."""
    for value in list(branch.initializers.values()):
        branch.initializers.pop(value.name or "")
        register(graph, value)
    nodes = list(branch)
    results = list(branch.outputs)
    branch.outputs.clear()
    branch.remove(nodes)
    for moved in nodes:
        for value in moved.outputs:
            value.name = f"{node.name or node.outputs[0].name}/{value.name}"
    graph.insert_before(node, nodes)
    for output, result in zip(node.outputs, results, strict=True):
        if output.is_graph_output():  # which keeps its name
            named = ir.node("Identity", [result], name=f"{output.name}/taken")
            named.outputs[0].name, named.outputs[0].type, named.outputs[0].shape = (
                output.name,
                result.type,
                result.shape,
            )
            graph.insert_before(node, named)
            result = named.outputs[0]
        output.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return nodes
