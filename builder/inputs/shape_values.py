"""Inputs whose values are a shape, such as a number of tokens to keep: TensorRT needs the range of the values."""

from collections.abc import Mapping

import onnx_ir as ir

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.inputs.shapes import Profile, Profiles
from trt_nvfp4.graph_passes.ir.nodes import is_op

# The operands of these operators that say what is how large.
_SHAPES = {
    **dict.fromkeys(("Expand", "OneHot", "Pad", "Reshape", "Split", "Tile", "TopK"), (1,)),
    "CenterCropPad": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "Resize": (3,),
    "Slice": (1, 2, 4),
}
# What shapes are computed with; values of tensors (ReduceSum of a mask) are not known by a range.
_ARITHMETIC = (
    *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Div", "Equal", "Floor", "Gather", "Greater", "Identity"),
    *("Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum"),
    *("Reshape", "Round", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
_FLAGS = ("--min-shapes", "--opt-shapes", "--max-shapes")


def shape_values(graph: ir.Graph) -> dict[str, int]:
    """The inputs whose values are a shape, and how many values each has; -1 where that is not known."""
    pending = [
        value
        for node in graph.all_nodes()
        if is_op(node, *_SHAPES)
        for index, value in enumerate(node.inputs)
        if value is not None and index in _SHAPES[node.op_type]
    ]
    inputs, found, seen = set(graph.inputs), {}, set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in inputs:
            dims = None if value.shape is None else list(value.shape)
            if dims is not None and len(dims) < 2:
                found[value.name or ""] = 1 if not dims else dims[0] if isinstance(dims[0], int) else -1
        elif is_op(node := value.producer(), *_ARITHMETIC):
            pending += [operand for operand in node.inputs if operand is not None]
    return found


def value_profiles(values: Mapping[str, int], bounds: tuple[Mapping[str, Shape], ...]) -> Profiles:
    """Profiles of the inputs `values` (see `shape_values`) from the overrides, min, opt and max; one that is
    given stands for those that are not.

    Raises BuilderError: usage where nothing is given, as many values are not expected, or they are out of order; model
    where the number of values is dynamic.
    """
    profiles = {}
    for name, count in values.items():
        given = [bound.get(name) for bound in bounds]
        stated = [shape for shape in given if shape is not None]
        if count < 0:
            raise ModelFaultError(
                f"input {name!r}: its values are a shape of unknown rank; export the model with a "
                "fixed number, or make them constants"
            )
        if not stated:
            example = "x".join("8" * count)
            raise UsageError(
                f"input {name!r}: its values are a shape, whose range TensorRT needs to know; add "
                f"{', '.join(f'{flag} {name}:{example}' for flag in _FLAGS)} with the values that it may have, or make "
                "it a constant of the model"
            )
        for flag, shape in zip(_FLAGS, given, strict=True):
            if shape is not None and len(shape) != count:
                raise UsageError(
                    f"{flag} {name}:{'x'.join(map(str, shape))}: expected {count} values, separated by 'x': those of "
                    "the input, which are a shape"
                )
        low, middle, high = (shape or stated[min(place, len(stated) - 1)] for place, shape in enumerate(given))
        if not all(a <= b <= c for a, b, c in zip(low, middle, high, strict=True)):
            raise UsageError(
                f"input {name!r}: its values, min {list(low)}, opt {list(middle)}, max {list(high)}, are out of "
                f"order ({', '.join(_FLAGS)})"
            )
        profiles[name] = Profile(low, middle, high, is_values=True)
    return profiles
