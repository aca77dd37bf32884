"""Chooses the nodes of a float32 network that stay float32 when the rest is computed in 16 bits, each with a reason."""

import re
from collections.abc import Callable, Iterable, Iterator

import onnx
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common.cache_names import is_past
from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.ir.opsets import changed_before
from trt_nvfp4.graph_passes.load.by_hand import is_plugin
from trt_nvfp4.plugins.ops import OPS

ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Div", "Erf", "Exp", "Floor", "Identity", "Log", "Max", "Min", "Mod"),
        *("Mul", "Neg", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sqrt", "Sub", "Tanh", "Where"),
    }
)
# What only moves values.
MOVES = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Slice"),
        *("Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    }
)
# Sums of many terms. The largest of many values is exact in any type.
_REDUCTIONS = frozenset(
    {
        *("CumSum", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum"),
        "ReduceSumSquare",
    }
)
# What of a reduced value is still one: a variance, its root, its inverse.
_OF_REDUCED = frozenset({"Add", "Clip", "Div", "Log", "Max", "Mul", "Pow", "Reciprocal", "Sqrt", "Sub", *MOVES})
# ONNX lets most operators compute in bfloat16 since then.
_BFLOAT16_OPSET, _OLDEST_OPSET = 22, 19
_LOSSES = ("LogSoftmax", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
# What TensorRT-RTX 1.7.1 reads or builds in float32, and not in 16 bits (tests/builder/tensorrt/test_sixteen_bits.py).
_NO_SIXTEEN_BITS = frozenset({"Celu"})
_NO_BFLOAT16 = frozenset({"ConvTranspose", "GRU", "HardSwish", "LpNormalization", "LpPool", "Mish", "Shrink"})
# Places of a LinearAttention: the state in and out, and where the decay and the update rate begin among its inputs.
_STATE, _PRESENT, _GATES = 3, 1, 4
# A chain of elementwise nodes behind a product is shorter than this.
_MOST_NODES = 64

_NORM = "sums of many terms, such as the variance of a norm"
_CANCELS = "1 + erf or 1 + tanh loses its value in 16 bits where they are near -1"
_ANGLES = "angles of positions"
_POSITIONS = "numbers of positions"
_INTEGERS = "its value becomes an integer, a choice or a size"
_PLACES = "places in an image, between whose pixels 16 bits do not tell"
_ODDS = "odds, which near 0 and 1 lose their value in 16 bits"
_GATED = "the decay of a state, which many tokens multiply"
_ENDS = "probabilities or losses that are outputs"
_STEP = "an input, changed, is an output: steps of denoising, which add up"


def opset_for(model: ir.Model, dtype: ir.DataType) -> int:
    """The default operator set that `model` has to import to compute in `dtype`."""
    now = model.opset_imports[""]
    may_rise = now >= _OLDEST_OPSET and not any(changed_before(model, _BFLOAT16_OPSET))
    return max(now, _BFLOAT16_OPSET) if dtype == ir.DataType.BFLOAT16 and may_rise else now


def float32_nodes(model: ir.Model, dtype: ir.DataType, keep: str | None = None) -> dict[str, list[str]]:
    """Names of the nodes of `model` that stay float32 in a network of type `dtype`, by reason, in graph order.

    `keep` is the user's regular expression, searched in the nodes' names. The bodies of control flow stay as they are.
    """
    graph, opset = model.graph, opset_for(model, dtype)
    reasons: dict[ir.Node, str] = {}

    def mark(nodes: Iterable[ir.Node], reason: str) -> None:
        for node in nodes:
            reasons.setdefault(node, reason)

    pattern = None if keep is None else re.compile(keep)
    for node in graph:
        if not any(map(is_float32, (*node.inputs, *node.outputs))):
            continue
        if pattern is not None and pattern.search(node.name or ""):
            mark([node], f"matched by --set keep-fp32={keep}")
        elif _leaves_floats(node):
            mark(_before(node, _any_of(ELEMENTWISE, MOVES, {"Softmax"})), _INTEGERS)
        elif (why := _not_in(node, dtype, opset)) is not None:
            mark([node], why)
        elif is_op(node, "LinearAttention"):
            gates = (value.producer() for value in node.inputs[_GATES:] if value is not None)
            for gate in filter(None, gates):
                mark(_before(gate, _any_of(ELEMENTWISE, MOVES, {"Softplus"})), _GATED)
        elif is_op(node, "GridSample"):
            mark(_before(node, _any_of(ELEMENTWISE, MOVES)), _PLACES)
        elif is_op(node, "Log") and is_op(operand(node, 0).producer(), "Div"):
            mark(_before(node, _any_of(ELEMENTWISE, MOVES)), _ODDS)
        elif is_op(node, *_REDUCTIONS):
            mark(_reduction(node), _NORM)
        elif is_op(node, "Erf", "Tanh") and any(is_op(user, "Add") for user in node.outputs[0].consumers()):
            mark(_cancellation(node), _CANCELS)
        elif is_op(node, "Sin", "Cos"):
            mark(_angles(node), _ANGLES)
        elif is_op(node, "Range") or (is_op(node, "Cast") and _numbers_positions(node.inputs[0])):
            mark(_positions(node), _POSITIONS)
        elif is_op(node, "Floor", "Ceil", "Round", "Mod"):
            mark(_before(node, _any_of(ELEMENTWISE, MOVES, {"Softmax"})), _INTEGERS)
        elif is_op(node, *_LOSSES) or (is_op(node, "Softmax", "Sigmoid") and _is_an_end(node)):
            mark([node], _ENDS)
    for output in graph.outputs:
        mark(_step(output), _STEP)
    by_reason: dict[str, list[str]] = {}
    for node in graph:
        if node in reasons:
            by_reason.setdefault(reasons[node], []).append(node.name or "")
    return by_reason


def is_float32(value: ir.Value | None) -> bool:
    """Whether it is a float32 tensor."""
    return value is not None and value.dtype == ir.DataType.FLOAT


def takes(node: ir.Node, index: int, dtype: ir.DataType, opset: int, is_output: bool = False) -> bool:
    """Whether ONNX, or the definition of an op of ours, allows an input (or output) of `node` to have type `dtype`, in
    that operator set."""
    if is_plugin(node):
        definition = OPS[node.op_type]
        return (definition.outputs if is_output else definition.inputs)[index].type in ("T", "C")
    if is_op(node, "LinearAttention") and index == (_PRESENT if is_output else _STATE):
        return False
    schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
    formals = schema.outputs if is_output else schema.inputs
    formal = formals[min(index, len(formals) - 1)]
    return f"tensor({dtype.name.lower()})" in formal.types


def _not_in(node: ir.Node, dtype: ir.DataType, opset: int) -> str | None:
    """Why the operator itself has to stay float32."""
    if is_plugin(node):
        return None
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return f"operator {node.op_type} of domain '{node.domain or 'ai.onnx'}' may know only float32"
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        return "control flow, whose bodies stay as they are"
    if is_op(node, *_RANDOM):
        return "random numbers"
    if any(value is not None and not isinstance(value.type, ir.TensorType) for value in (*node.inputs, *node.outputs)):
        return "sequences of tensors"
    if is_op(node, *_NO_SIXTEEN_BITS, *(_NO_BFLOAT16 if dtype == ir.DataType.BFLOAT16 else ())):
        return f"TensorRT has no {node.op_type} in {dtype.name.lower()}"
    outputs = [index for index, value in enumerate(node.outputs) if is_float32(value)]
    if is_op(node, "LinearAttention"):
        outputs.remove(_PRESENT)  # which stays float32 beside an output in 16 bits
    if any(not takes(node, index, dtype, opset, is_output=True) for index in outputs):
        return f"operator {node.op_type} has no {dtype.name.lower()} in opset {opset}"
    return None


def _step(output: ir.Value) -> list[ir.Node]:
    """The nodes of an output that is an elementwise step from an input of its shape: x + dt * v; none for a cache."""
    producer = output.producer()
    if producer is None or not is_float32(output):
        return []
    found = list(_before(producer, _any_of(ELEMENTWISE, MOVES), itself=False))
    changes = _any_of(ELEMENTWISE)
    own = [node for node in (producer, *found) if changes(node) for value in node.inputs if _becomes(value, node)]
    return [producer, *found] if own and _any_of(ELEMENTWISE, MOVES)(producer) else []


def _becomes(value: ir.Value | None, node: ir.Node) -> bool:
    """Whether an input of the graph, and no cache, has the shape of what `node` makes."""
    if value is None or not value.is_graph_input() or is_past(value.name or "") or not is_float32(value):
        return False
    return value.shape is not None and value.shape == node.outputs[0].shape


def _reduction(node: ir.Node) -> Iterator[ir.Node]:
    """A reduction, what computes its terms, and what becomes of it up to where it meets the whole tensor again."""
    yield node
    yield from _before(node, _is_term, itself=False)
    pending: list[tuple[ir.Value, list[ir.Node]]] = [(value, []) for value in node.outputs]
    seen: set[ir.Node] = set()
    while pending:
        value, moves = pending.pop()  # moves between it and the last node that computes something
        for user in value.consumers():
            if user in seen or not is_op(user, *_OF_REDUCED) or not is_float32(user.outputs[0]):
                continue
            seen.add(user)
            # x - mean is as large as x, and its square is the next reduction's term.
            meets = _size(user.outputs[0]) != _size(node.outputs[0])
            if not meets and is_op(user, *MOVES):
                pending.append((user.outputs[0], [*moves, user]))
            elif (is_op(user, "Expand", "Tile") or not is_op(user, *MOVES)) if meets else _is_statistic(user):
                yield from (*moves, user)
                if not meets:
                    pending.append((user.outputs[0], []))


def _is_statistic(node: ir.Node) -> bool:
    """Computes from reductions and constants only, as a variance and its root: a sum of experts that is added to a
    residual is not one."""
    pending, seen = [node], {node}
    while pending and len(seen) < _MOST_NODES:
        for value in pending.pop().inputs:
            if value is None or get_const_tensor(value) is not None:
                continue
            producer = value.producer()
            if producer is None or not is_op(producer, *_REDUCTIONS, *_OF_REDUCED):
                return False
            if producer not in seen and not is_op(producer, *_REDUCTIONS):
                seen.add(producer)
                pending.append(producer)
    return not pending


def _is_term(node: ir.Node) -> bool:
    """Computes a term of a reduction: a square, a difference, an exponential."""
    return is_op(node, "Abs", "Exp", "Pow", "Sub") or (is_op(node, "Mul") and node.inputs[0] is node.inputs[1])


def _size(value: ir.Value) -> tuple[object, ...] | None:
    """The shape without axes of size 1."""
    return None if value.shape is None else tuple(str(dim) for dim in value.shape if dim != 1)


def _cancellation(node: ir.Node) -> Iterator[ir.Node]:
    """An activation written out: what computes it from one value, elementwise, and nothing else."""
    inner = list(_before(node, lambda part: is_op(part, *ELEMENTWISE) and all(map(_is_no_vector, part.inputs))))
    known = {value for part in inner for value in (*part.inputs, *part.outputs)}
    yield from inner
    pending = [node]
    while pending:
        for user in {user for value in pending.pop().outputs for user in value.consumers()}:
            inputs = [value for value in user.inputs if value is not None]
            own = all(v in known or get_const_tensor(v) is not None for v in inputs) and all(map(_is_no_vector, inputs))
            if is_op(user, *ELEMENTWISE) and own and user.outputs[0] not in known:
                known.update(user.outputs)
                pending.append(user)
                yield user


def _is_no_vector(value: ir.Value | None) -> bool:
    """Not a constant of more than one number, as a bias is."""
    tensor = None if value is None else get_const_tensor(value)
    return tensor is None or tensor.size <= 1


def _angles(node: ir.Node) -> list[ir.Node]:
    """A sine or cosine and what computes its angle of numbers of positions; of features, nothing."""
    found = list(_before(node, _any_of(ELEMENTWISE, MOVES, {"MatMul", "Einsum", "Range", "Sin", "Cos"})))
    products = [part for part in found if is_op(part, "MatMul", "Einsum")]
    inner = {value for part in found for value in part.outputs}
    sources = [value for part in found for value in part.inputs if value is not None and value not in inner]
    features = any(
        is_float32(value) and not value.is_graph_input() and get_const_tensor(value) is None for value in sources
    )
    weights = [tensor for part in products for v in part.inputs if v and (tensor := get_const_tensor(v)) is not None]
    return [] if features or any(_is_matrix(tensor) for tensor in weights) else found


def _is_matrix(tensor: ir.TensorProtocol) -> bool:
    """More than one row and column: the weights of a linear, and no list of frequencies."""
    return sum(int(dim) > 1 for dim in tensor.shape.numpy()) > 1


def _numbers_positions(value: ir.Value | None) -> bool:
    """Whether integers count positions: they come of a Range, a Shape or a running sum."""
    if value is None or value.dtype is None or not value.dtype.is_integer():
        return False
    pending, seen = [value], set[ir.Value]()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop().producer()
        if node is None:
            continue
        if is_op(node, "Range", "Shape", "Size", "CumSum"):
            return True
        for source in node.inputs[:1] if node.op_type in MOVES else node.inputs:
            if source is not None and source not in seen and source.dtype is not None and source.dtype.is_integer():
                seen.add(source)
                pending.append(source)
    return False


def _positions(node: ir.Node) -> Iterator[ir.Node]:
    """`node`, and the nodes that compute with only its numbers and constants."""
    known = set(node.outputs)
    yield node
    pending = [node]
    while pending:
        for user in {user for value in pending.pop().outputs for user in value.consumers()}:
            own = all(v is None or v in known or get_const_tensor(v) is not None for v in user.inputs)
            if user.op_type in ELEMENTWISE | MOVES and own and user.outputs[0] not in known:
                known.update(user.outputs)
                pending.append(user)
                yield user


def _leaves_floats(node: ir.Node) -> bool:
    """Reads floats and makes integers of them, but for conversions of booleans."""
    if is_op(node, "TopK", "ArgMax", "ArgMin", "NonMaxSuppression"):
        return True
    to = node.outputs[0].dtype
    return is_op(node, "Cast") and is_float32(node.inputs[0]) and to is not None and to.is_integer()


def _is_an_end(node: ir.Node) -> bool:
    """Its values reach outputs of the graph and nothing else."""
    pending = list(node.outputs)
    ends = False
    while pending:
        value = pending.pop()
        ends |= value.is_graph_output()
        for user in value.consumers():
            if user.op_type not in MOVES:
                return False
            pending += user.outputs
    return ends


def _any_of(*operators: Iterable[str]) -> Callable[[ir.Node], bool]:
    names = frozenset().union(*operators)
    return lambda node: not node.domain and node.op_type in names


def _before(node: ir.Node, allowed: Callable[[ir.Node], bool], itself: bool = True) -> Iterator[ir.Node]:
    """`node` and the float32 nodes that compute its inputs, as far as they are `allowed`."""
    if itself:
        yield node
    pending, seen = [node], {node}
    while pending and len(seen) < _MOST_NODES:
        for value in pending.pop().inputs:
            producer = None if value is None or get_const_tensor(value) is not None else value.producer()
            if producer is not None and producer not in seen and is_float32(producer.outputs[0]) and allowed(producer):
                seen.add(producer)
                pending.append(producer)
                yield producer
