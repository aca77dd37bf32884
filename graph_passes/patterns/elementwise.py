"""The elementwise region between linears, and what scalar function it computes.

An activation is recognised by its values, not by its spelling: the region is evaluated on sample points and compared
with the functions that the ops serve. Every decomposition of GELU, SiLU and so on that an exporter may choose is thus
covered by one rule; onnxscript's pattern rewriter would need one pattern per spelling, association and operand order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor
from torch.nn import functional as F  # noqa: N812 (its customary name)

from trt_nvfp4.graph_passes.ir.last_axis import RESHAPES, keeps_last_axis
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, drops, is_float_cast, is_op, operand
from trt_nvfp4.graph_passes.ir.same_shape import have_one_shape
from trt_nvfp4.graph_passes.patterns.give_ups import described, gave_up

# An activation has about ten nodes; anything larger is something else.
_MAX_NODES = 48

_Function = Callable[..., torch.Tensor]
_FUNCTIONS: dict[str, _Function] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "Div": torch.div,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Max": lambda *values: reduce(torch.maximum, values),
    "Min": lambda *values: reduce(torch.minimum, values),
    "Mish": F.mish,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "Pow": torch.pow,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Where": torch.where,
}
# Functions with attributes: node -> function.
_WITH_ATTRIBUTES: dict[str, Callable[[ir.Node], _Function]] = {
    "Celu": lambda n: lambda x: F.celu(x, n.attributes.get_float("alpha", 1.0)),
    "Clip": lambda n: (
        lambda x, low=None, high=None: torch.clip(
            x,
            low if low is not None else torch.tensor(n.attributes.get_float("min", -np.inf)),
            high if high is not None else torch.tensor(n.attributes.get_float("max", np.inf)),
        )
    ),
    "Elu": lambda n: lambda x: F.elu(x, n.attributes.get_float("alpha", 1.0)),
    "Gelu": lambda n: lambda x: F.gelu(x, approximate=n.attributes.get_string("approximate", "none")),
    "HardSigmoid": lambda n: (
        lambda x: torch.clip(n.attributes.get_float("alpha", 0.2) * x + n.attributes.get_float("beta", 0.5), 0, 1)
    ),
    "LeakyRelu": lambda n: lambda x: F.leaky_relu(x, n.attributes.get_float("alpha", 0.01)),
    "Selu": lambda n: (
        lambda x: n.attributes.get_float("gamma", 1.0507010) * F.elu(x, n.attributes.get_float("alpha", 1.6732632))
    ),
    "Swish": lambda n: lambda x: x * torch.sigmoid(n.attributes.get_float("alpha", 1.0) * x),
    "ThresholdedRelu": lambda n: lambda x: F.threshold(x, n.attributes.get_float("alpha", 1.0), 0.0),
}
_PASS_THROUGH = ("Cast", "Dropout", "Identity")


@dataclass(frozen=True)
class Region:
    """Nodes that compute `output` elementwise from `leaves`; reshapes among them keep the last axis.

    `half_constants`: some constant was rounded to 16 bits by the exporter.
    """

    output: ir.Value
    leaves: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]
    constants: Mapping[ir.Value, float]
    half_constants: bool

    @property
    def operators(self) -> str:
        """The operators that compute, for messages."""
        return ", ".join(dict.fromkeys(n.op_type for n in self.nodes if n.op_type not in (*_PASS_THROUGH, *RESHAPES)))

    @property
    def reshapes(self) -> bool:
        """The axes before the last may differ between leaves and output."""
        return any(node.op_type in RESHAPES for node in self.nodes)

    @property
    def multiplies_leaves(self) -> bool:
        """Some product or quotient joins parts that depend on different leaves, as a gate does."""
        leaves_of = {leaf: frozenset((leaf,)) for leaf in self.leaves}
        for node in self.nodes:
            parts = [leaves_of[value] for value in node.inputs if value in leaves_of]
            if not parts:
                continue  # of constants only
            if node.op_type in ("Div", "Mul") and parts[0] != parts[-1]:
                return True
            leaves_of[node.outputs[0]] = frozenset().union(*parts)
        return False

    def evaluate(self, *points: torch.Tensor) -> torch.Tensor:
        """The region's values at float64 points, one tensor per leaf."""
        values: dict[ir.Value, torch.Tensor] = dict(zip(self.leaves, points, strict=True))
        values.update({value: torch.tensor(number, dtype=torch.float64) for value, number in self.constants.items()})
        for node in self.nodes:
            inputs = [None if value is None else values.get(value) for value in node.inputs]
            if node.op_type in (*_PASS_THROUGH, *RESHAPES):
                result = inputs[0]
            elif node.op_type in _FUNCTIONS:
                result = _FUNCTIONS[node.op_type](*inputs)
            else:
                result = _WITH_ATTRIBUTES[node.op_type](node)(*inputs)
            assert result is not None
            values[node.outputs[0]] = result
        return values[self.output]


def region_before(
    output: ir.Value, is_leaf: Callable[[ir.Value], bool], features: int, reader: ir.Node | None = None
) -> Region | None:
    """The elementwise region that ends in `output` and starts at leaves, or None where something else feeds it.

    `features` is the size of the last axis throughout. Leaves have one shape, and no value in the region another one,
    but for reshapes. `reader` reads the output; it is noted where no region is found.
    """
    leaves: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    constants: dict[ir.Value, float] = {}
    entered: set[ir.Node] = set()
    constant_types: set[ir.DataType] = set()

    def stop(why: str) -> bool:
        gave_up("mlp", reader, why)
        return False

    def visit(value: ir.Value) -> bool:
        if value in leaves or value in constants:
            return True
        if is_leaf(value):
            leaves[value] = None
            return True
        tensor = get_const_tensor(value)
        if tensor is not None:
            if tensor.size != 1 or not (tensor.dtype.is_floating_point() or tensor.dtype.is_integer()):
                return stop(f"constant '{value.name}' is more than one number, or of type {tensor.dtype.name.lower()}")
            constant_types.add(tensor.dtype)
            number = float(np.asarray(tensor.numpy()).reshape(()))
            if tensor.dtype in FLOATS and abs(number) == float(tensor.dtype.max):
                number = math.copysign(math.inf, number)  # a bound at the end of the type's range does not bound
            constants[value] = number
            return True
        node = value.producer()
        if node is None or value is not node.outputs[0]:  # such as the mask of a Dropout
            return stop(f"it reads {described(value)}, which is not a linear of {features} channels")
        if node in nodes:
            return True
        if len(entered) >= _MAX_NODES:
            return stop(f"more than {_MAX_NODES} nodes lie between its linears")
        entered.add(node)
        if is_op(node, *RESHAPES):
            inputs = [operand(node, 0)] if keeps_last_axis(node, features) else []
        elif is_op(node, *_PASS_THROUGH):
            changes = (is_op(node, "Cast") and not is_float_cast(node)) or drops(node)
            inputs = [] if changes else [operand(node, 0)]
        elif is_op(node, *_FUNCTIONS, *_WITH_ATTRIBUTES):
            inputs = [value for value in node.inputs if value is not None]
        else:
            return stop(
                f"node '{node.name}' ({node.op_type}) is neither an elementwise function that is known nor a linear of "
                f"{features} channels"
            )
        if not inputs:
            return stop(f"node '{node.name}' ({node.op_type}) changes the last axis, or rounds, or drops values")
        if not all(visit(value) for value in inputs):
            return False
        nodes[node] = None  # after its inputs: nodes stay in order of computation
        return True

    if not visit(output):
        return None
    if not leaves:
        gave_up("mlp", reader, f"no linear of {features} channels lies before it")
        return None
    if not have_one_shape(nodes, leaves):
        gave_up("mlp", reader, f"tensors before it have different shapes, down from {described(output)}")
        return None
    half = not constant_types.isdisjoint((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
    return Region(output, tuple(leaves), tuple(nodes), constants, half)
