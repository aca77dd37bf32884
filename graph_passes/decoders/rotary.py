"""Rotary embeddings as operators in front of an attention, in the layout that attention over caches has."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import (
    constant_integers,
    ints_attribute,
    is_op,
    operand,
    optional_operand,
    register,
)
from trt_nvfp4.graph_passes.patterns.attention.types import DecoderError

_HEADS_FIRST = [0, 2, 1, 3]
# Where X, positions, cos and sin are among the inputs; ONNX has positions last.
_INPUTS = {"com.microsoft": (0, 1, 2, 3), "": (0, 3, 1, 2)}
# Attributes of ONNX Runtime's operator that ONNX's lacks, with what means nothing.
_NEUTRAL = {"scale": 1.0, "is_packed_batching": 0}


def lower_rotary(graph: ir.Graph) -> None:
    """RotaryEmbedding nodes of ONNX Runtime, and those of tokens [batch, new, heads * head_dim], become ONNX's over
    [batch, heads, new, head_dim]. Raises DecoderError, naming the node, for what ONNX's cannot say."""
    for node in list(graph):
        if node.op_type != "RotaryEmbedding" or node.domain not in _INPUTS:
            continue
        is_flat = _is_flat(node)
        if node.domain or is_flat:
            _lower(graph, node, is_flat)


def _is_flat(node: ir.Node) -> bool:
    """Whether it takes [batch, new, heads * head_dim]; behind operators of ONNX Runtime shapes are not known."""
    x = operand(node, 0)
    if x.shape is not None:
        return len(x.shape) == 3
    if is_op(before := x.producer(), "Transpose") and (perm := ints_attribute(before, "perm")) is not None:
        return len(perm) == 3
    return bool(node.domain) or node.attributes.get_int("num_heads", 0) > 0


def _lower(graph: ir.Graph, node: ir.Node, is_flat: bool) -> None:
    where = f"node '{node.name}' (RotaryEmbedding)"
    for name, neutral in _NEUTRAL.items():
        if name in node.attributes and node.attributes[name].value != neutral:
            raise DecoderError(f"{where} has {name}")
    x, positions, cos, sin = (optional_operand(node, index) for index in _INPUTS[node.domain])
    if x is None or cos is None or sin is None:
        raise DecoderError(f"{where} has no tables")
    if positions is not None and positions.shape is not None and len(positions.shape) < 2:
        raise DecoderError(f"{where} takes one position for all sequences; export it with an input position_ids")
    nodes: list[ir.Node] = []
    result = node.outputs[0]

    def add(op: str, inputs: list[ir.Value], **attributes: list[int] | int) -> ir.Value:
        made = ir.node(op, inputs, attributes, name=f"{node.name}/{op}.{len(nodes)}")
        made.outputs[0].type = result.type
        nodes.append(made)
        return made.outputs[0]

    def shape(*sizes: int) -> ir.Value:
        value = ir.Value(name=f"{node.name}/shape.{len(nodes)}", const_value=ir.tensor(list(sizes)))
        register(graph, value)
        return value

    attributes = {name: node.attributes.get_int(name, 0) for name in ("interleaved", "rotary_embedding_dim")}
    if is_flat:
        heads = node.attributes.get_int("num_heads", 0)
        half = cos.shape[-1] if cos.shape is not None else None
        if not heads and not isinstance(half, int):
            raise DecoderError(f"{where} has neither a number of heads nor tables of a static width")
        sizes = [0, 0, heads, -1] if heads else [0, 0, -1, 2 * (half if isinstance(half, int) else 0)]
        x = add("Transpose", [add("Reshape", [x, shape(*sizes)])], perm=_HEADS_FIRST)
    turned = add("RotaryEmbedding", [x, cos, sin, *([] if positions is None else [positions])], **attributes)
    if is_flat:
        _take_from(turned, result, sizes)
        flat = add("Reshape", [add("Transpose", [turned], perm=_HEADS_FIRST), shape(0, 0, -1)])
    else:
        flat = turned
    flat.type, flat.shape = result.type, result.shape
    graph.insert_before(node, nodes)
    result.replace_all_uses_with(flat, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _take_from(turned: ir.Value, flat: ir.Value, sizes: list[int]) -> None:
    """Let what would bring the flat tokens into `turned`'s layout again take it as it is; `sizes` is how it split
    them, -1 for what the others leave."""
    for split in flat.consumers():
        again = constant_integers(operand(split, 1)) if is_op(split, "Reshape") else None
        if (
            again is None
            or len(again) != len(sizes)
            or any(size not in (-1, other) for size, other in zip(sizes, again, strict=False))
        ):
            continue
        for transpose in split.outputs[0].consumers():
            if is_op(transpose, "Transpose") and ints_attribute(transpose, "perm") == _HEADS_FIRST:
                value = transpose.outputs[0]
                turned.type, turned.shape = value.type, value.shape
                value.replace_all_uses_with(turned, replace_graph_outputs=True)
