"""Operators that move elements without computing: shapes, slices, joins; and those that read or make shapes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator


@operator("Shape", of_shape=True)
def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size", of_shape=True)
def size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


@operator("Constant")
def constant(
    *,
    value: Tensor | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
) -> Tensor:
    if value is not None:
        return value
    whole = value_int if value_int is not None else value_ints
    if whole is not None:
        return torch.tensor(whole, dtype=torch.int64)
    return torch.tensor(value_float if value_float is not None else value_floats, dtype=torch.float32)


@operator("ConstantOfShape", host=(0,))
def constant_of_shape(shape: Tensor, *, value: Tensor | None = None) -> Tensor:
    filled = torch.zeros(1) if value is None else value
    return filled.reshape(()).expand(shape.tolist()).clone()


@operator("Range", host=(0, 1, 2))
def number_range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("Reshape", host=(1,))
def reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = shape.tolist()
    if not allowzero:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(x.shape[:axis].numel(), -1)


@operator("Expand", host=(1,))
def expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(shape.tolist())))


@operator("Tile", host=(1,))
def tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(repeats.tolist())


@operator("Transpose")
def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(*(perm if perm is not None else reversed(range(x.dim()))))


@operator("Concat")
def concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


@operator("Split", host=(1,))
def split(
    x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    if sizes is not None:
        return torch.split(x, sizes.tolist(), axis)
    assert num_outputs is not None
    return torch.split(x, -(-x.shape[axis] // num_outputs), axis)


@operator("Squeeze", host=(1,))
def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(axes.flatten().tolist())


@operator("Unsqueeze", host=(1,))
def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in axes.flatten().tolist()):
        x = x.unsqueeze(axis)
    return x


@operator("Slice", host=(1, 2, 3, 4))
def cut(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    count = starts.numel()
    on = list(range(count)) if axes is None else axes.tolist()
    by = [1] * count if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), on, by, strict=True):
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        if not taken:
            x = x.narrow(axis, 0, 0)
            continue
        lowest, highest = min(taken[0], taken[-1]), max(taken[0], taken[-1])
        x = x.narrow(axis, lowest, highest - lowest + 1)
        if step < 0:
            x = x.flip(axis)
        if abs(step) > 1:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(None, None, abs(step)),)]
    return x


@operator("Pad", host=(1, 2, 3))
def pad(
    x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None, *, mode: str = "constant"
) -> Tensor:
    if mode != "constant":
        raise NotImplementedError(f"Pad with mode {mode}")
    on = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes.tolist()]
    before, after = pads.tolist()[: len(on)], pads.tolist()[len(on) :]
    sizes = {axis: (b, a) for axis, b, a in zip(on, before, after, strict=True)}
    # Torch counts axes from the last.
    flat = [amount for axis in reversed(range(x.dim())) for amount in sizes.get(axis, (0, 0))]
    return functional.pad(x, flat, value=0 if value is None else value.item())


@operator("Trilu", host=(1,))
def trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else int(k.item())
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)
