"""Replaces arithmetic that ONNX has no operators for, while a model is exported.

Complex numbers are pairs of real tensors: Llama 4, DeepSeek-V2, Z-Image and Qwen-Image write their rotary embeddings
with them. The inverse error function is a polynomial: Gemma 3n takes a quantile of the normal distribution for its
sparse activations. Squeezing a dimension that is not 1 changes nothing in Torch, and is an error in ONNX: Mistral 3
does so. ONNX Runtime has no Where of booleans, which filling a mask becomes: HunyuanVideo does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Complex:
    """A complex tensor as two real ones. What arranges values, by a method of tensors or a function of Torch, is done
    with both."""

    def __init__(self, real: torch.Tensor, imaginary: torch.Tensor) -> None:
        self.real, self.imaginary = real, imaginary

    @property
    def device(self) -> torch.device:
        return self.real.device

    @property
    def shape(self) -> torch.Size:
        return self.real.shape

    def __len__(self) -> int:
        return len(self.real)

    def __mul__(self, other: _Complex | torch.Tensor | float) -> _Complex:
        if isinstance(other, _Complex):
            return _Complex(
                self.real * other.real - self.imaginary * other.imaginary,
                self.real * other.imaginary + self.imaginary * other.real,
            )
        return _Complex(self.real * other, self.imaginary * other)

    def __getitem__(self, index: Any) -> _Complex:
        if not isinstance(index, (int, slice, tuple, type(None), type(...))):
            index = index.long()  # GatherND takes no int32
        return _Complex(self.real[index], self.imaginary[index])

    def to(self, *arguments: Any, **named: Any) -> _Complex:
        kept = [argument for argument in arguments if not getattr(argument, "is_complex", False)]
        return _Complex(self.real.to(*kept, **named), self.imaginary.to(*kept, **named)) if kept or named else self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _ARRANGING:
            raise AttributeError(f"{name} of a complex tensor has no ONNX operator")

        def arranged(*arguments: Any, **named: Any) -> Any:
            return _paired(*(getattr(part, name)(*arguments, **named) for part in (self.real, self.imaginary)))

        return arranged

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        if func.__name__ not in _ARRANGING:
            return NotImplemented
        halves = [
            tree_map_only(_Complex, part, (args, kwargs or {}))
            for part in (lambda number: number.real, lambda number: number.imaginary)
        ]
        return _paired(*(func(*positional, **named) for positional, named in halves))


# These arrange values, and make none but 0.
_ARRANGING = frozenset(
    [
        "cat",
        "stack",
        "split",
        "chunk",
        "view",
        "reshape",
        "expand",
        "repeat",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "contiguous",
        "clone",
        "flip",
        "pad_sequence",
    ]
)


def _paired(real: Any, imaginary: Any) -> Any:
    if isinstance(real, (list, tuple)):
        return [_Complex(*parts) for parts in zip(real, imaginary, strict=True)]
    return _Complex(real, imaginary)


@contextmanager
def complex_as_pairs(module: torch.nn.Module) -> Iterator[None]:
    """Within, tables of complex numbers that modules hold (not as buffers) are pairs of real ones."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for holder in _holders(module):
        for name, value in list(vars(holder).items()):
            pair = _as_pairs(value)
            if pair is not None:
                replaced.append((vars(holder), name, value))
                vars(holder)[name] = pair
    try:
        yield
    finally:
        for attributes, name, value in replaced:
            attributes[name] = value


def _holders(module: torch.nn.Module) -> Iterator[Any]:
    """Modules, and objects of their package that they hold."""
    for part in module.modules():
        yield part
        own = type(part).__module__
        yield from (
            value for value in vars(part).values() if type(value).__module__ == own and hasattr(value, "__dict__")
        )


def _as_pairs(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_complex():
        return _Complex(value.real.contiguous(), value.imag.contiguous())
    if (
        isinstance(value, list)
        and value
        and all(isinstance(each, torch.Tensor) and each.is_complex() for each in value)
    ):
        return [_as_pairs(each) for each in value]
    return None


@contextmanager
def onnx_arithmetic() -> Iterator[None]:
    """Within, `torch.polar`, `torch.view_as_complex` and `torch.view_as_real` deal in pairs of real tensors, and
    `torch.erfinv`, `Tensor.squeeze` and `Tensor.masked_fill` in what ONNX, and ONNX Runtime, has."""
    import torch

    from trt_nvfp4.builder.export.erfinv import erfinv

    replaced = {
        "polar": lambda radius, angle: _Complex(radius * angle.cos(), radius * angle.sin()),
        "view_as_complex": lambda pairs: _Complex(pairs[..., 0], pairs[..., 1]),
        "view_as_real": lambda number: torch.stack((number.real, number.imaginary), -1),
        "erfinv": erfinv,
    }
    originals = {name: getattr(torch, name) for name in replaced}
    squeeze, masked_fill = torch.Tensor.squeeze, torch.Tensor.masked_fill

    def squeezed(tensor: torch.Tensor, *dims: Any, **named: Any) -> torch.Tensor:
        dim = named.get("dim", dims[0] if len(dims) == 1 else None)
        if isinstance(dim, int) and tensor.dim() and isinstance(size := tensor.shape[dim], int) and size != 1:
            return tensor
        return squeeze(tensor, *dims, **named)

    def filled(tensor: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
        if tensor.dtype == torch.bool and isinstance(value, bool):
            return tensor | mask if value else tensor & ~mask
        return masked_fill(tensor, mask, value)

    for name, function in replaced.items():
        setattr(torch, name, function)
    torch.Tensor.squeeze = squeezed  # type: ignore[method-assign,assignment]
    torch.Tensor.masked_fill = filled  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.squeeze = squeeze  # type: ignore[method-assign]
        torch.Tensor.masked_fill = masked_fill  # type: ignore[method-assign]
        for name, function in originals.items():
            setattr(torch, name, function)
