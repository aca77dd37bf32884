"""Operators that choose elements by indices which other nodes compute. Negative indices count from the end."""

import torch
from torch import Tensor

from .registry import operator


@operator("Gather")
def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis % x.dim()
    flat = torch.remainder(indices.reshape(-1), x.shape[axis])
    return x.index_select(axis, flat).reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.remainder(indices, x.shape[axis]).long())


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    # An axis more, which no index of 0 dimensions survives: Torch would read it on the CPU.
    places = [part.unsqueeze(-1) for part in indices.long().unbind(-1)]
    rank = places[0].dim()
    for axis in range(batch_dims):
        row = torch.arange(x.shape[axis], device=x.device)
        places.insert(axis, row.view([-1 if at == axis else 1 for at in range(rank)]))
    return x[tuple(places)].squeeze(rank - 1)


@operator("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    at = torch.remainder(indices, x.shape[axis]).long()
    if reduction == "none":
        return x.scatter(axis, at, updates)
    if reduction == "add":
        return x.scatter_add(axis, at, updates)
    raise NotImplementedError(f"ScatterElements with reduction {reduction}")


@operator("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"ScatterND with reduction {reduction}")
    places = indices.long().unbind(-1)
    return x.clone().index_put(places, updates, accumulate=reduction == "add")


@operator("TensorScatter", writes=(0,))
def tensor_scatter(
    past: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """`update` [batch, ..., new, ...] in `past` at each sequence's own place along `axis`, in place."""
    new = update.shape[axis]
    at = torch.arange(new, device=past.device)
    if write_indices is not None:
        at = write_indices.long()[:, None] + at
    if mode == "circular":
        at = torch.remainder(at, past.shape[axis])
    sizes = [1] * past.dim()
    sizes[0], sizes[axis] = (1 if write_indices is None else past.shape[0]), new
    return past.scatter_(axis, at.view(sizes).expand_as(update), update)


@operator("TopK", host=(1,))
def top_k(x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, ...]:
    # ONNX takes the first of equal values, torch.topk any.
    found = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = int(k.item())
    return found.values.narrow(axis, 0, count), found.indices.narrow(axis, 0, count)


@operator("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    if not select_last_index:
        return x.argmax(axis, bool(keepdims))
    return x.shape[axis] - 1 - x.flip(axis).argmax(axis, bool(keepdims))


@operator("CumSum", host=(1,))
def cumulative_sum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    on = int(axis.item())
    x = x.flip(on) if reverse else x
    found = x.cumsum(on, dtype=x.dtype)
    found = found - x if exclusive else found
    return found.flip(on) if reverse else found


@operator("OneHot", host=(1,))
def one_hot(indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(depth.item())
    numbers = torch.arange(count, device=indices.device)
    column = indices.unsqueeze(-1)
    # An index out of range is nowhere.
    hot = (column == numbers) | (column + count == numbers)
    found = torch.where(hot, values[1], values[0])
    return found.movedim(-1, axis)
