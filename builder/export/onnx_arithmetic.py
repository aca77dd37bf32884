"""What ONNX has no operators for, by those that it has, while a model is exported.

Complex numbers are pairs of real tensors: Llama 4 and DeepSeek-V2 write their rotary embeddings with them. The inverse
error function is a polynomial: Gemma 3n takes a quantile of the normal distribution for its sparse activations.
Squeezing a dimension that is not 1 changes nothing in Torch, and is an error in ONNX: Mistral 3 does so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Complex:
    """What those models do with a complex tensor."""

    def __init__(self, real: torch.Tensor, imaginary: torch.Tensor) -> None:
        self.real, self.imaginary = real, imaginary

    @property
    def device(self) -> torch.device:
        return self.real.device

    def __mul__(self, other: _Complex | torch.Tensor | float) -> _Complex:
        if isinstance(other, _Complex):
            return _Complex(
                self.real * other.real - self.imaginary * other.imaginary,
                self.real * other.imaginary + self.imaginary * other.real,
            )
        return _Complex(self.real * other, self.imaginary * other)

    def __getitem__(self, index: Any) -> _Complex:
        return _Complex(self.real[index], self.imaginary[index])

    def to(self, *arguments: Any) -> _Complex:
        return _Complex(self.real.to(*arguments), self.imaginary.to(*arguments))

    def unsqueeze(self, axis: int) -> _Complex:
        return _Complex(self.real.unsqueeze(axis), self.imaginary.unsqueeze(axis))


@contextmanager
def onnx_arithmetic() -> Iterator[None]:
    """Within, `torch.polar`, `torch.view_as_complex` and `torch.view_as_real` deal in pairs of real tensors, and
    `torch.erfinv` and `Tensor.squeeze` in what ONNX has."""
    import torch

    from trt_nvfp4.builder.export.erfinv import erfinv

    replaced = {
        "polar": lambda radius, angle: _Complex(radius * angle.cos(), radius * angle.sin()),
        "view_as_complex": lambda pairs: _Complex(pairs[..., 0], pairs[..., 1]),
        "view_as_real": lambda number: torch.stack((number.real, number.imaginary), -1),
        "erfinv": erfinv,
    }
    originals = {name: getattr(torch, name) for name in replaced}
    squeeze = torch.Tensor.squeeze

    def squeezed(tensor: torch.Tensor, *dims: Any, **named: Any) -> torch.Tensor:
        dim = named.get("dim", dims[0] if len(dims) == 1 else None)
        if isinstance(dim, int) and tensor.dim() and isinstance(size := tensor.shape[dim], int) and size != 1:
            return tensor
        return squeeze(tensor, *dims, **named)

    for name, function in replaced.items():
        setattr(torch, name, function)
    torch.Tensor.squeeze = squeezed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.squeeze = squeeze  # type: ignore[method-assign]
        for name, function in originals.items():
            setattr(torch, name, function)
