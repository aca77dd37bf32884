"""Operators over whole axes: sums, norms, softmax."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator

_FLOAT = 1  # onnx.TensorProto.FLOAT, the type in which norms are computed


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.mean(axes, keep) if x.is_floating_point() else x.sum(axes, keep) // x.numel()


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceMean": _mean,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keep, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keep),
}


def _register(name: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    @operator(name, host=(1,))
    def compute(x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        on = [] if axes is None else axes.flatten().tolist()
        if not on and noop_with_empty_axes:
            return x
        return function(x, on or list(range(x.dim())), bool(keepdims))


for _name, _function in _REDUCTIONS.items():
    _register(_name, _function)


@operator("Softmax")
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return x.softmax(axis)


@operator("LogSoftmax")
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return x.log_softmax(axis)


@operator("LayerNormalization")
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = _FLOAT,
) -> Tensor:
    # Torch computes in float32 itself.
    return functional.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


@operator("RMSNormalization")
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = _FLOAT) -> Tensor:
    wide = x.float() if stash_type == _FLOAT else x
    return functional.rms_norm(wide, x.shape[axis:], None, epsilon).to(x.dtype) * scale
