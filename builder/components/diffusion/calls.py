"""Calls of a pipeline's modules: their tensors by name, and what else they say."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

#: Leaves that a call may have beside tensors: the part is built for their values.
Constant: TypeAlias = bool | int | float | str | None
#: Where tensors go in what a module returns: a tensor's name, None where nothing reads it, a list, or fields by name.
Layout: TypeAlias = "str | list[Layout] | dict[str, Layout] | None"


@dataclass
class Call:
    """One call: its arguments by name, what came back, and the tensors in it that the pipeline has read."""

    arguments: Mapping[str, Any]
    result: Any = None
    read: set[int] = field(default_factory=set)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, by names such as `hidden_states` and `added_cond_kwargs.time_ids`."""
        return {name: leaf for name, leaf in leaves(self.arguments) if isinstance(leaf, torch.Tensor)}

    def constants(self) -> dict[str, Any]:
        """The other leaves."""
        return {name: leaf for name, leaf in leaves(self.arguments) if not isinstance(leaf, torch.Tensor)}

    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors of the result that the pipeline reads, by names such as `hidden_states.1`."""
        found = leaves(self.result, "out")
        return {name: leaf for name, leaf in found if isinstance(leaf, torch.Tensor) and id(leaf) in self.read}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, lists and tuples, by dotted names."""
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        yield name, value
        return
    for key, child in children:
        yield from leaves(child, f"{name}.{key}" if name else str(key))


def filled(value: Any, tensors: Mapping[str, torch.Tensor], name: str = "") -> Any:
    """The nested value with other tensors in the places of its own."""

    def child(key: object, each: Any) -> Any:
        return filled(each, tensors, f"{name}.{key}" if name else str(key))

    if isinstance(value, Mapping):
        return {key: child(key, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(child(key, each) for key, each in enumerate(value))
    return tensors[name] if isinstance(value, torch.Tensor) else value


def layout(value: Any, names: Sequence[str], name: str = "out") -> Layout:
    """Where the tensors called `names` lie in a result."""
    if isinstance(value, Mapping):
        return {str(key): layout(child, names, f"{name}.{key}") for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(child, names, f"{name}.{key}") for key, child in enumerate(value)]
    return name if name in names else None


def bound(method: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their parameters' names. Raises TypeError for those that the method does not take."""
    signature = inspect.signature(method)
    found = dict(signature.bind(*arguments, **named).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    # Random numbers are the scheduler's: no module draws any.
    return {name: value for name, value in found.items() if not isinstance(value, torch.Generator)}


class _Watched(torch.Tensor):
    """A tensor that notes that something was done with it."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(tensor: _Watched) -> torch.Tensor:
            tensor.note()
            return tensor.as_subclass(torch.Tensor)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(_Watched, plain, (args, kwargs or {}))
            return func(*args, **kwargs)


@contextmanager
def recording(methods: Mapping[str, tuple[torch.nn.Module, str]]) -> Iterator[dict[str, list[Call]]]:
    """Within, calls of modules' methods are noted, by the names in `methods`."""
    calls: dict[str, list[Call]] = {name: [] for name in methods}
    with ExitStack() as stack:
        for name, (module, method) in methods.items():
            # A part may be in the method's place already.
            before = vars(module).get(method)
            setattr(module, method, _noting(getattr(module, method), calls[name]))
            stack.callback(*((delattr, module, method) if before is None else (setattr, module, method, before)))
        yield calls


def _noting(method: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        call = Call(tree_map_only(torch.Tensor, torch.clone, bound(method, arguments, named)))
        result = method(*arguments, **named)
        call.result = tree_map_only(torch.Tensor, torch.clone, result)
        calls.append(call)

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            view = tensor.clone().as_subclass(_Watched)
            view.note = lambda: call.read.add(id(tensor))
            return view

        return tree_map_only(torch.Tensor, watched, call.result)

    return noted
