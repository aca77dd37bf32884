"""One op, defined once: its ONNX schema, function body, Torch reference and shape rules all come from here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import onnx
import onnx.parser
import torch
from torch import Tensor

from trt_nvfp4.plugins.ops.activation import GATED_ONLY, Activation
from trt_nvfp4.plugins.ops.number_formats import BLOCK

DOMAIN = "trt_nvfp4"
VERSION = 1
BODY_OPSET = 21  # what the bodies are written for
OLDEST_MODEL_OPSET = 17  # of those that the bodies are tested under

Attribute = int | float
Dim = int | str | None  # a number, a symbol, or unknown
Shape = tuple[Dim, ...]

# Where an op has this attribute: 1 promises that its activations' tensor scales are not 0. The kernels then spare the
# passes that would find them; the result is the same.
STATIC_SCALES = "static_scales"
# Which scales a block of 16 activations that become NVFP4 may take: see `number_formats.quantize_blocks`.
SCALE_SEARCH = "scale_search"
# So many last channels of activations that become NVFP4 are followed by what NVFP4 loses of them: see
# `number_formats.quantize_with_residual`. K of weights is more by as many.
RESIDUAL_CHANNELS = "residual_channels"
MOST_RESIDUAL_CHANNELS = 64
QUANTIZATION_FLAGS = {SCALE_SEARCH: 0, RESIDUAL_CHANNELS: 0}
QUANTIZATION_RANGES = {SCALE_SEARCH: (0, 2), RESIDUAL_CHANNELS: (0, MOST_RESIDUAL_CHANNELS)}
ACTIVATION_SCALES = ("input_tensor_scale", "hidden_tensor_scale", "input_scale", "hidden_scale")

ACTIVATION_TYPES = ("tensor(float16)", "tensor(bfloat16)", "tensor(float)")
# What the types of formals stand for that are no ONNX type.
TYPE_VARIABLES = {
    "T": (ACTIVATION_TYPES, "The type of the activations."),
    "C": ((*ACTIVATION_TYPES, "tensor(int8)"), "The type of the caches: T, or E4M3 bytes."),
    "L": (("tensor(int32)", "tensor(int64)"), "The type of lengths."),
    "S": (ACTIVATION_TYPES, "The type of recurrent states."),
}
_TORCH_TYPES = {
    torch.float16: "tensor(float16)",
    torch.bfloat16: "tensor(bfloat16)",
    torch.float32: "tensor(float)",
    torch.int8: "tensor(int8)",
    torch.int32: "tensor(int32)",
    torch.int64: "tensor(int64)",
}


class OpError(ValueError):
    """An op was given tensors or attributes that it does not take."""


@dataclass(frozen=True)
class Formal:
    """An input or output: its name, its ONNX type or one of TYPE_VARIABLES, what it holds."""

    name: str
    type: str
    doc: str


@dataclass(frozen=True)
class OpDefinition:
    """One op of the domain `trt_nvfp4`.

    `attributes` maps every attribute to its default: int attributes are 0/1 flags, except `activation`
    (see `Activation`) and those that `ranges` gives a smallest and a largest value; float ones are finite and not
    negative. All inputs are mandatory.
    """

    name: str
    doc: str
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, Attribute]
    body: str  # statements of the ONNX function, in ONNX's textual syntax
    torch_reference: Callable[..., Tensor | tuple[Tensor, ...]]
    shape_rule: "Callable[[ShapeRule], Sequence[Shape]]"
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    takes_no_tokens: bool = False  # whether the Torch reference does
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # of attributes that are strings

    @property
    def required(self) -> int:
        """The number of inputs that every node has."""
        return len(self.inputs)

    def schema(self) -> onnx.defs.OpSchema:
        """The ONNX schema, ready for `onnx.defs.register_schema`."""
        return onnx.defs.OpSchema(
            self.name,
            DOMAIN,
            VERSION,
            doc=self.doc,
            inputs=[onnx.defs.OpSchema.FormalParameter(f.name, f.type, f.doc) for f in self.inputs],
            outputs=[onnx.defs.OpSchema.FormalParameter(f.name, f.type, f.doc) for f in self.outputs],
            type_constraints=[
                (name, list(types), doc)
                for name, (types, doc) in TYPE_VARIABLES.items()
                if any(formal.type == name for formal in self.inputs)
            ],
            attributes=[
                onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, default))
                for name, default in self.attributes.items()
            ],
        )

    def function(self, opset: int = BODY_OPSET) -> onnx.FunctionProto:
        """The ONNX function that computes the op with standard operators.

        `opset` is that of the model that carries it: ONNX Runtime inlines a function under the model's own opset.
        The body means the same under every opset from 17 on. Raises OpError: an older one.
        """
        if opset < OLDEST_MODEL_OPSET:
            raise OpError(
                f"{self.name}: its ONNX function needs a model of opset {OLDEST_MODEL_OPSET} or newer, found opset "
                f"{opset}: convert the model (onnx.version_converter)"
            )
        attributes = ", ".join(
            f"{name}: {'int' if isinstance(default, int) else 'float'} = {default!r}"
            for name, default in self.attributes.items()
        )
        return onnx.parser.parse_function(
            f'<opset_import: ["": {opset}], domain: "{DOMAIN}">\n'
            f"{self.name} <{attributes}> ({', '.join(f.name for f in self.inputs)})"
            f" => ({', '.join(f.name for f in self.outputs)})\n{{{self.body}\n}}"
        )

    def node(
        self, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: Attribute
    ) -> onnx.NodeProto:
        """A node of this op. Every attribute is written out, as ONNX's reference evaluator needs.

        Raises OpError: another number of inputs or outputs than the op has, attributes that it does not take.
        """
        if (len(inputs), len(outputs)) != (len(self.inputs), len(self.outputs)):
            raise OpError(
                f"{self.name} has {len(self.inputs)} inputs and {len(self.outputs)} outputs, "
                f"found {len(inputs)} and {len(outputs)}"
            )
        complete = self.complete_attributes(**attributes)
        return onnx.helper.make_node(self.name, inputs, outputs, name or None, domain=DOMAIN, **complete)

    def reference(self, *tensors: Tensor, **attributes: Attribute) -> Tensor | tuple[Tensor, ...]:
        """The op in Torch: slow, simple, trusted; written apart from the ONNX body.

        Raises OpError: shapes, types or attributes that do not fit the op, a scale of 0 against static_scales.
        """
        self.check([tuple(t.shape) for t in tensors], [_TORCH_TYPES.get(t.dtype) for t in tensors], **attributes)
        complete = self.complete_attributes(**attributes)
        if complete.pop(STATIC_SCALES, 0):
            for formal, tensor in zip(self.inputs, tensors, strict=True):
                if formal.name in ACTIVATION_SCALES and not tensor.all():
                    raise OpError(f"{self.name}: {STATIC_SCALES} promises a {formal.name} that is not 0")
        if self.takes_no_tokens or all(tensor.numel() for tensor in tensors):
            return self.torch_reference(*tensors, **complete)
        # No token: as of one of zeros, without its rows.
        one = [tensor if tensor.numel() else tensor.new_zeros(1, tensor.shape[-1]) for tensor in tensors]
        found = self.torch_reference(*one, **complete)
        outputs = found if isinstance(found, tuple) else (found,)
        shapes = [
            [size for size in shape if isinstance(size, int)]
            for shape in self.output_shapes([tuple(tensor.shape) for tensor in tensors], **attributes)
        ]
        empty = tuple(y[:0].reshape(shape) if 0 in shape else y for y, shape in zip(outputs, shapes, strict=True))
        return empty if isinstance(found, tuple) else empty[0]

    def output_shapes(self, input_shapes: Sequence[Shape], **attributes: Attribute) -> list[Shape]:
        """Shapes of the outputs, after checking those of the inputs. Leading dimensions of the activations may be
        symbolic or unknown; what depends on them is None.

        Raises OpError: another number of inputs than the op has, shapes or attributes that do not fit it.
        """
        if len(input_shapes) != len(self.inputs):
            raise OpError(f"{self.name} takes {len(self.inputs)} inputs, found {len(input_shapes)}")
        names = [f.name for f in self.inputs]
        rule = ShapeRule(self.name, dict(zip(names, input_shapes, strict=True)), self.complete_attributes(**attributes))
        return list(self.shape_rule(rule))

    def check(self, input_shapes: Sequence[Shape], input_types: Sequence[str | None], **attributes: Attribute) -> None:
        """Raise OpError unless shapes, types (ONNX's, such as "tensor(int8)") and attributes fit the op."""
        self.output_shapes(input_shapes, **attributes)
        chosen: dict[str, str | None] = {}  # the first formal of a variable decides for the others
        for formal, found in zip(self.inputs, input_types, strict=True):
            variable, fp8 = formal.type, attributes.get("fp8_cache", 0)
            allowed: Sequence[str | None] = (variable,)
            if variable in chosen:
                allowed = (chosen[variable],)
            elif variable == "C":
                allowed = ("tensor(int8)" if fp8 else input_types[0],)
            elif variable in TYPE_VARIABLES:
                allowed = TYPE_VARIABLES[variable][0]
            chosen[variable] = found
            if found not in allowed:
                raise OpError(f"{self.name}: {formal.name} must be {' or '.join(map(str, allowed))}, found {found}")

    def complete_attributes(self, **attributes: Attribute) -> dict[str, Any]:
        """All attributes, defaults filled in; raises OpError for an unknown one or a value out of range."""
        for name, value in attributes.items():
            if name not in self.attributes:
                raise OpError(f"{self.name} has no attribute {name}, only {', '.join(self.attributes)}")
            if name == "activation":
                self._check_activation(value)
            elif isinstance(self.attributes[name], int):
                smallest, largest = self.range_of(name)
                if value not in range(smallest, largest + 1):
                    allowed = "0 or 1" if (smallest, largest) == (0, 1) else f"{smallest} to {largest}"
                    raise OpError(f"{self.name}: {name} must be {allowed}, found {value}")
            elif not (math.isfinite(value) and value >= 0):
                raise OpError(f"{self.name}: {name} must be finite and not negative, found {value}")
        # A number of the other kind would be an ONNX attribute of another type.
        kinds = {name: type(default) for name, default in self.attributes.items()}
        return {**self.attributes, **{name: kinds[name](value) for name, value in attributes.items()}}

    def range_of(self, attribute: str) -> tuple[int, int]:
        """The smallest and the largest value of an int attribute."""
        if attribute == "activation":
            return min(Activation), max(Activation)
        return self.ranges.get(attribute, (0, 1))

    def _check_activation(self, value: Attribute) -> None:
        if value not in Activation.__members__.values():
            known = ", ".join(f"{int(a)} {a.name.lower()}" for a in Activation)
            raise OpError(f"{self.name}: activation must be one of {known}; found {value}")


@dataclass(frozen=True)
class ShapeRule:
    """The arguments of an op's shape rule: the input shapes by name, the attributes, and the checks that it repeats."""

    op: str
    shapes: Mapping[str, Shape]
    attributes: Mapping[str, Any]

    def expect(self, tensor: str, expected: Shape) -> None:
        """`tensor` has the shape `expected`, as far as both are known. Raises OpError: it has another."""
        found = self.shapes[tensor]
        if not shapes_fit(found, expected):
            raise OpError(f"{self.op}: {tensor} must have shape {_text(expected)}, found {_text(found)}")

    def rows(self, tensor: str) -> tuple[Shape, int]:
        """The leading dimensions of activations [..., K], and K.

        Raises OpError: K is unknown, or no positive multiple of 16.
        """
        shape = self.shapes[tensor]
        if not shape or not isinstance(shape[-1], int):
            raise OpError(f"{self.op}: the last dimension of {tensor} must be known, found shape {_text(shape)}")
        self._check_blocks(tensor, shape[-1])
        return shape[:-1], shape[-1]

    def weight(self, tensor: str, k: int, values_per_byte: int, batch: Shape = ()) -> int:
        """Check weights [*batch, N, k / values_per_byte]; return N.

        Raises OpError: another shape, an unknown N, k no positive multiple of 16.
        """
        self._check_blocks(tensor, k)
        shape, columns = self.shapes[tensor], k // values_per_byte
        if len(shape) != len(batch) + 2 or not isinstance(shape[-2], int):
            raise OpError(f"{self.op}: {tensor} must have shape {_text((*batch, 'N', columns))}, found {_text(shape)}")
        self.expect(tensor, (*batch, shape[-2], columns))
        return shape[-2]

    def _check_blocks(self, tensor: str, k: int) -> None:
        if k <= 0 or k % BLOCK:
            raise OpError(
                f"{self.op}: K of {tensor} must be a positive multiple of {BLOCK} (an NVFP4 block), found {k}"
            )

    def residual_channels(self, *widths: int) -> int:
        """The attribute, 0 of an op that has none. `widths`: how many channels there are of each activation that it
        quantizes. Raises OpError: no multiple of 16, more than there are channels, activations that stay in 16 bits.
        """
        channels: int = self.attributes.get(RESIDUAL_CHANNELS, 0)
        if channels % BLOCK or channels > min(widths, default=channels):
            raise self.error(
                f"{RESIDUAL_CHANNELS} must be a multiple of {BLOCK} and at most K = {min(widths)}, found {channels}"
            )
        if channels and not self.attributes.get("quantize_activations", 1):
            raise self.error(f"{RESIDUAL_CHANNELS} needs quantize_activations 1")
        return channels

    def expect_ungated_activation(self) -> None:
        activation = self.attributes["activation"]
        if activation in GATED_ONLY:
            raise self.error(f"activation {Activation(activation).name.lower()} needs a gate")

    def error(self, message: str) -> OpError:
        return OpError(f"{self.op}: {message}")


def shapes_fit(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether a tensor can have both shapes: symbols and unknowns, on either side, fit anything."""
    return len(a) == len(b) and all(
        x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)
    )


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"
