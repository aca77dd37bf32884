"""Attention over caches that are updated in place: the operator of opset 23, or what it consists of."""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, optional_operand
from trt_nvfp4.graph_passes.ir.tensors import read_tensor
from trt_nvfp4.graph_passes.patterns.attention.concatenated import product_behind, upwards, without_factor

# Between probabilities and the product with values; a Slice leaves a sink's probability out.
_BEHIND = ("Cast", "Identity", "Where", "Dropout", "Slice", "Reshape")
# A score below it counts for nothing.
_HIDDEN = -1e4
_LATENT = (
    "its keys and values are computed from the cache at every step (latent attention), and CachedAttention reads keys "
    "and values that are cached as they are"
)


@dataclass(frozen=True)
class Core:
    """softmax(softcap(scale * query key^T) where mask, sinks) value; keys and values are what two TensorScatter nodes
    give out. `query` and `result` are [batch, heads, new, head_dim]."""

    node: ir.Node
    query: ir.Value
    key: ir.Node
    value: ir.Node
    mask: ir.Value
    result: ir.Value
    scale: float
    softcap: float = 0.0
    sinks: np.ndarray | None = None


def match_core(node: ir.Node) -> Core | str | None:
    """The attention around `node`, an Attention or Softmax; a text where it cannot be described; None where it does not
    read a cache."""
    if is_op(node, "Attention"):
        return _match_operator(node)
    return _match_softmax(node) if is_op(node, "Softmax") else None


def _match_operator(node: ir.Node) -> Core | str | None:
    key, value = (_scatter(operand(node, index)) for index in (1, 2))
    if key is None or value is None or key[1] != 1 or value[1] != 1:
        return None
    query, mask = operand(node, 0), optional_operand(node, 3)
    if query.shape is None or len(query.shape) != 4 or not isinstance(query.shape[3], int):
        return "its queries are not [batch, heads, new, head_dim] of a known size"
    if node.attributes.get_int("is_causal", 0) or mask is None:
        return "it has no mask computed from positions"
    if len([output for output in node.outputs if output.uses() or output.is_graph_output()]) > 1:
        return "it gives out more than its result"
    scale = node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(query.shape[3])
    softcap = node.attributes.get_float("softcap", 0.0)
    return Core(node, query, key[0], value[0], mask, node.outputs[0], scale, softcap)


def _match_softmax(node: ir.Node) -> Core | str | None:
    product = product_behind(node, lambda user, _: is_op(user, *_BEHIND))
    if product is None:
        return None
    value = _scatter(operand(product, 1))
    if value is None:
        return _LATENT if _computed_from_cache(operand(product, 1)) else None
    if value[1] != 1:
        return "a factor multiplies its values"
    result = product.outputs[0]
    users = result.consumers()
    # Heads that share keys and values are rows of one matrix.
    if len(users) == 1 and is_op(users[0], "Reshape") and _rank(users[0].outputs[0]) == 4:
        result = users[0].outputs[0]
    scores, sinks = _without_sinks(operand(node, 0))
    scores, behind = without_factor(_without_floor(_through(scores, "Cast", "Identity")))
    masked = _through(scores, "Cast", "Identity").producer()
    if is_op(masked, "Where"):
        mask, scores = operand(masked, 0), operand(masked, 1)
    elif is_op(masked, "Add"):
        one = 0 if _is_score(operand(masked, 0)) else 1
        scores, mask = operand(masked, one), operand(masked, 1 - one)
    else:
        return "it has no mask computed from positions"
    scores, softcap, before = _without_softcap(scores)
    if softcap and behind != 1:
        return "a factor multiplies its scores behind a soft cap"
    first = scores.producer()
    while is_op(first, "Reshape", "Cast", "Identity"):
        first = operand(first, 0).producer()
    if not is_op(first, "MatMul"):
        return "what its scores are computed by was not recognized"
    key = _scatter(operand(first, 1))
    heads = None if result.shape is None else result.shape[1]
    query, factor = _query(operand(first, 0), heads)
    if key is None or query is None:
        return "its scores are not the product of queries [batch, heads, new, head_dim] and a cache"
    return Core(node, query, key[0], value[0], mask, result, behind * before * factor * key[1], softcap, sinks)


def _without_sinks(scores: ir.Value) -> tuple[ir.Value, np.ndarray | None]:
    """(scores, a logit per head) where a Concat adds one."""
    node = _through(scores, "Cast", "Identity").producer()
    if not is_op(node, "Concat") or len(node.inputs) != 2:
        return scores, None
    sink = _through(operand(node, 1), "Cast", "Identity", "Expand", "Reshape", "Unsqueeze")
    tensor = get_const_tensor(sink)
    return (scores, None) if tensor is None else (operand(node, 0), _float32(tensor))


def _float32(tensor: ir.TensorProtocol) -> np.ndarray:
    return read_tensor(tensor).astype(np.float32).reshape(-1)


def _without_floor(scores: ir.Value) -> ir.Value:
    """Scores in front of a Max that lifts -inf to the smallest number of their type, which no sum of a score and a mask
    needs."""
    node = scores.producer()
    if not is_op(node, "Max") or len(node.inputs) != 2:
        return scores
    for one in (0, 1):
        tensor = get_const_tensor(_through(operand(node, 1 - one), "Cast", "Identity"))
        if tensor is not None and tensor.size == 1 and _float32(tensor)[0] <= _HIDDEN:
            return operand(node, one)
    return scores


def _without_softcap(scores: ir.Value) -> tuple[ir.Value, float, float]:
    """(what is capped, the cap, the factor of what is capped); no cap is 0."""
    inner, outer = without_factor(scores)
    tanh = inner.producer()
    if not is_op(tanh, "Tanh"):
        return inner, 0.0, outer
    inner, factor = without_factor(operand(tanh, 0))
    return inner, outer, factor * outer


def _query(value: ir.Value, heads: object) -> tuple[ir.Value | None, float]:
    """(queries by head, their factor)."""
    value, factor = without_factor(value)
    while value.shape is None or len(value.shape) != 4 or value.shape[1] != heads:
        node = value.producer()
        if not is_op(node, "Reshape"):
            return None, factor
        value, by = without_factor(operand(node, 0))
        factor *= by
    return value, factor


def _is_score(value: ir.Value) -> bool:
    value, _ = without_factor(value)
    while is_op(node := value.producer(), "Reshape", "Cast", "Tanh"):
        value, _ = without_factor(operand(node, 0))
    return is_op(value.producer(), "MatMul")


def _scatter(value: ir.Value) -> tuple[ir.Node, float] | None:
    """(the TensorScatter that `value` repeats and turns, the scalars that multiply it)."""
    factor = 1.0
    for inner, by in upwards(value):
        factor *= by
        node = inner.producer()
        if is_op(node, "TensorScatter"):
            return (node, factor) if operand(node, 0).is_graph_input() and len(node.inputs) == 3 else None
    return None


def _computed_from_cache(value: ir.Value) -> bool:
    """Whether a cache reaches `value`, and not by way of another attention."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop().producer()
        if is_op(node, "TensorScatter"):
            return True
        if node is not None and not is_op(node, "Softmax", "Attention", "Shape"):
            new = [operand for operand in node.inputs if operand is not None and operand not in seen]
            seen.update(new)
            pending += new
    return False


def _through(value: ir.Value, *op_types: str) -> ir.Value:
    while is_op(node := value.producer(), *op_types):
        value = operand(node, 0)
    return value


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)
