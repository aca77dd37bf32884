"""Operators that compute each element by itself, with ONNX's rounding, broadcasting and types."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator
from .tensors import torch_type

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": functional.softplus,
    "Sqrt": torch.sqrt,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}


def _register() -> None:
    # Torch's own functions have no signature to check nodes against.
    def unary(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x)

    def binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: function(x, y)

    for name, one in _UNARY.items():
        operator(name)(unary(one))
    for name, two in _BINARY.items():
        operator(name)(binary(two))


_register()


@operator("Div")
def div(x: Tensor, y: Tensor) -> Tensor:
    """Integers are cut off towards 0."""
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@operator("Mod")
def mod(x: Tensor, y: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


@operator("Pow")
def power(x: Tensor, y: Tensor) -> Tensor:
    return torch.pow(x, y).to(x.dtype)


@operator("Min")
def least(*tensors: Tensor) -> Tensor:
    return reduce(torch.minimum, tensors)


@operator("Max")
def greatest(*tensors: Tensor) -> Tensor:
    return reduce(torch.maximum, tensors)


@operator("Sum")
def total(*tensors: Tensor) -> Tensor:
    return reduce(torch.add, tensors)


@operator("Clip")
def clip(x: Tensor, lowest: Tensor | None = None, highest: Tensor | None = None) -> Tensor:
    x = x if lowest is None else torch.maximum(x, lowest)
    return x if highest is None else torch.minimum(x, highest)


@operator("Where")
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


@operator("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


@operator("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return functional.leaky_relu(x, alpha)


@operator("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1) -> Tensor:
    return _to(x, torch_type(to), saturate)


@operator("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1) -> Tensor:
    return _to(x, like.dtype, saturate)


def _to(x: Tensor, dtype: torch.dtype, saturate: int) -> Tensor:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        if not saturate:
            raise NotImplementedError("Cast to FP8 without saturation")
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)
