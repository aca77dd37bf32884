"""What ONNX has no operators for, by those that it has, while a model is exported.

Complex numbers are pairs of real tensors: Llama 4 and DeepSeek-V2 write their rotary embeddings with them. The inverse
error function is a polynomial: Gemma 3n takes a quantile of the normal distribution for its sparse activations.
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


# Coefficients, the highest power's first, where 1 - x^2 is more than exp(-5), and in the tails.
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAILS = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """`torch.erfinv` to float32's precision, a relative error of less than 3e-7.

    By M. Giles, "Approximating the erfinv function", GPU Computing Gems (Jade Edition), 2012.
    """
    import torch

    wide = x.float()
    w = -((1 - wide) * (1 + wide)).log()
    inner = torch.where(w < 5, _polynomial(_CENTRE, w - 2.5), _polynomial(_TAILS, w.sqrt() - 3))
    return (wide * torch.where(wide.abs() == 1, torch.inf, inner)).to(x.dtype)


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


@contextmanager
def real_arithmetic() -> Iterator[None]:
    """Within, `torch.polar`, `torch.view_as_complex` and `torch.view_as_real` deal in pairs of real tensors, and
    `torch.erfinv` in what ONNX has."""
    import torch

    replaced = {
        "polar": lambda radius, angle: _Complex(radius * angle.cos(), radius * angle.sin()),
        "view_as_complex": lambda pairs: _Complex(pairs[..., 0], pairs[..., 1]),
        "view_as_real": lambda number: torch.stack((number.real, number.imaginary), -1),
        "erfinv": erfinv,
    }
    originals = {name: getattr(torch, name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)
