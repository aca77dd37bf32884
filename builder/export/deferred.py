"""Tensors that are read when they are needed, so that a model of any size loads in little memory.

transformers stacks, joins, transposes and casts the weights that files hold. Done to deferred tensors, that gives more
of them. Other operations read the values, use them once and drop them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Bytes up to which weights are read at once.
SMALL = 1 << 20
_ATEN = torch.ops.aten
# Operations that rearrange or cast values and compute none.
_ARRANGING = frozenset(
    {
        *(_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default),
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default),
        *(_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
        *(_ATEN.expand.default, _ATEN.stack.default, _ATEN.cat.default),
        *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int),
    }
)
# Those that treat parts along the first axis separately: part i of the result follows from part i of the operand.
_OF_VALUES = frozenset({_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default})


class ChangedInPlaceError(NotImplementedError):
    """Code changes a weight in place, which is read from a file each time."""


class DeferredTensor(torch.Tensor):
    """A tensor on the CPU without memory; `read` computes it anew."""

    _read: Callable[[], Tensor]
    # The operation and its arguments, to read only parts.
    _call: tuple[Any, list[Any], dict[str, Any]] | None

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> "DeferredTensor":
        """A deferred tensor of this shape and type, whose values `read` returns."""
        return _made(torch.empty(tuple(shape), dtype=dtype, device="meta"), read)

    def read(self) -> Tensor:
        """The values. Raises whatever reading the file raises."""
        return self._read()

    def part(self, index: int) -> Tensor:
        """`read()[index]`; of stacked or concatenated tensors, only what lies there is read."""
        if self._call is None:
            return self.read()[index]
        func, args, kwargs = self._call
        if func in _OF_VALUES and isinstance(args[0], DeferredTensor):
            kept = {name: value for name, value in kwargs.items() if name != "memory_format"}
            found: Tensor = func(args[0].part(index), *args[1:], **kept)
            return found
        axis = (args[1:2] or [0])[0]
        if func is _ATEN.stack.default and axis % self.dim() == 0:
            chosen: Tensor = _value(args[0][index])
            return chosen
        if func is _ATEN.cat.default and axis % self.dim() != 0:
            return torch.cat([_part(tensor, index) for tensor in args[0]], axis % self.dim() - 1)
        if func is _ATEN.transpose.int and 0 not in (axes := [axis % self.dim() for axis in args[1:3]]):
            return _part(args[0], index).transpose(axes[0] - 1, axes[1] - 1)
        if func is _ATEN.permute.default and args[1][0] % self.dim() == 0:
            return _part(args[0], index).permute([axis % self.dim() - 1 for axis in args[1][1:]])
        return self.read()[index]

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The values."""
        return self.read().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if func in _ARRANGING and all(isinstance(tensor, cls) for tensor in tensors):
            return _arranged(func, flat, spec)
        if func is _ATEN.index.Tensor and len(args[1]) == 1 and isinstance(args[0], cls):
            return _gathered(args[0], _value(args[1][0]))
        if _writes(func, args, kwargs):
            raise ChangedInPlaceError(f"{func} changes a weight in place, which is read from a file")
        args, kwargs = tree_unflatten([_value(value) for value in flat], spec)
        return func(*args, **kwargs)


def _writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `func` writes to a deferred tensor, not just to others with values of it."""
    written = [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(isinstance(value, DeferredTensor) for value in tree_flatten(written)[0])


def _made(meta: Tensor, read: Callable[[], Tensor], call: Any = None) -> DeferredTensor:
    made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
        DeferredTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
    )
    made._read, made._call = read, call
    return made


def _value(value: Any) -> Any:
    return value.read() if isinstance(value, DeferredTensor) else value


def _part(tensor: Tensor, index: int) -> Tensor:
    return tensor.part(index) if isinstance(tensor, DeferredTensor) else tensor[index]


def _arranged(func: Any, flat: list[Any], spec: Any) -> Any:
    """The result of `func` for deferred tensors, deferred."""
    shapes = [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, DeferredTensor)
        else value
        for value in flat
    ]
    args, kwargs = tree_unflatten(shapes, spec)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    meta = func(*args, **kwargs)
    own_args, own_kwargs = tree_unflatten(flat, spec)

    def read() -> Any:
        args, kwargs = tree_unflatten([_value(value) for value in flat], spec)
        return func(*args, **kwargs)

    if isinstance(meta, Tensor):
        return _made(meta, read, (func, list(own_args), own_kwargs))

    def one(number: int) -> Tensor:
        found: Tensor = read()[number]
        return found

    return [_made(each, partial(one, number)) for number, each in enumerate(meta)]


def _gathered(stack: DeferredTensor, index: Tensor) -> Tensor:
    """`stack[index]`, of which only the parts that the index names are read: the experts that tokens go to."""
    if index.dtype not in (torch.int64, torch.int32) or stack.dim() < 3:
        return stack.read()[index]
    if not index.numel():
        return torch.empty((*index.shape, *stack.shape[1:]), dtype=stack.dtype)
    named, places = torch.unique(index, return_inverse=True)
    return torch.stack([stack.part(int(number)) for number in named])[places]


def deferred_weights(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, DeferredTensor]]:
    """Deferred weights of a module and the modules in it, as (module, name in it, weight)."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, DeferredTensor):
                yield part, name, parameter


def replace_weight(module: torch.nn.Module, old: Tensor, new: Tensor) -> None:
    """Put `new` in the place of a weight, wherever the module has it."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                assert isinstance(new, torch.nn.Parameter)
                part._parameters[name] = new


def read_small(module: torch.nn.Module) -> None:
    """Read small weights and all buffers, and keep them: exporters look at their values."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if isinstance(buffer, DeferredTensor):
                part._buffers[name] = buffer.read().clone()
    small = {id(weight): weight for _, _, weight in deferred_weights(module) if weight.nbytes <= SMALL}
    for weight in small.values():
        replace_weight(module, weight, torch.nn.Parameter(weight.read().clone(), requires_grad=False))
