"""Parts that the user's Python file gives: `model.py:components`, a function that returns components by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trt_nvfp4.builder.components.manifest import Flow, Loop
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.source import Example, Source, as_array
from trt_nvfp4.builder.errors import BuilderError, UsageError, first_line
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.common.user_code import running

DEFAULT = "components"


@dataclass(frozen=True)
class Component:
    """A part of a model: a module that takes tensors in the order of `inputs` and returns one, or a tuple of them.

    An input is an example tensor, or the name of the tensor that flows in, such as "vision.features". `outputs` name
    what is returned. `dynamic`: input -> axis -> name of a dimension that may change; all else is fixed. `loop`: how
    often the part runs.
    """

    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor | str]
    outputs: Sequence[str]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    loop: Loop | None = None


def is_python_file(path: Path) -> bool:
    """Whether the path names a Python file, or a function in one."""
    return split_function(path)[0].suffix == ".py"


def of_file(path: Path, computed: bool = True) -> Source:
    """Run the user's file and take its components.

    Without `computed`, tensors between them have shapes and no values, which take large modules minutes.
    Raises UsageError, naming the file, where a component is not one.
    """
    file, function = split_function(path)
    found = _components(file, function or DEFAULT)
    parts: list[TorchPart] = []
    flows: list[Flow] = []
    values: dict[str, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    for name, component in found.items():
        where = f"{file}: component {name!r}"
        inputs: dict[str, torch.Tensor] = {}
        for target, source in component.inputs.items():
            if isinstance(source, str):
                if source not in values:
                    known = ", ".join(values) or "nothing yet"
                    raise UsageError(
                        f"{where}: the input {target} comes from {source!r}, and there is {known} before it"
                    )
                flows.append(Flow(source, f"{name}.{target}"))
                inputs[target] = values[source]
            else:
                inputs[target] = source
                if component.loop is None or target not in component.loop.values:
                    given[target] = source
        part = TorchPart(
            name,
            _Tuple(component.module).eval(),
            inputs,
            list(component.outputs),
            component.dynamic,
            loop=component.loop,
        )
        parts.append(part)
        values |= {f"{name}.{key}": tensor for key, tensor in (_run if computed else _shapes)(where, part).items()}
    taken = {flow.source for flow in flows}
    outputs = {name: as_array(tensor) for name, tensor in values.items() if name not in taken}
    example = Example({name: as_array(tensor) for name, tensor in given.items()}, outputs=outputs)
    return Source(file.stem, "run", parts, flows, {}, example)


class _Tuple(torch.nn.Module):
    """Returns a tuple where the module returns one tensor."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.module(*tensors)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _shapes(where: str, part: TorchPart) -> dict[str, torch.Tensor]:
    """Zeros of the shapes and types of the part's outputs; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in part.inputs.items()}
        found = _run(where, replace(part, inputs=fake, loop=None))
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}


def _run(where: str, part: TorchPart) -> dict[str, torch.Tensor]:
    """The part's outputs on its example, run as often as its loop says."""
    inputs, loop = dict(part.inputs), part.loop or Loop(1)
    found: dict[str, torch.Tensor] = {}
    for turn in range(loop.times):
        for name, numbers in loop.values.items():
            if name not in inputs or len(numbers) != loop.times:
                raise UsageError(
                    f"{where}: its loop gives {len(numbers)} numbers to {name!r}, and runs {loop.times} times over "
                    f"{', '.join(inputs)}"
                )
            inputs[name] = torch.full_like(inputs[name], numbers[turn])
        try:
            with torch.no_grad():
                results = part.module(*inputs.values())
        except Exception as error:  # whatever the user's module raises
            given = ", ".join(f"{name} {_type(tensor)}" for name, tensor in inputs.items())
            raise UsageError(f"{where}: does not run on {given}: {first_line(error)}") from error
        if len(results) != len(part.outputs):
            raise UsageError(f"{where}: returns {len(results)} tensors, and `outputs` names {len(part.outputs)}")
        found = dict(zip(part.outputs, results, strict=True))
        for output, target in loop.carry.items():
            if output not in found or target not in inputs:
                raise UsageError(f"{where}: its loop carries {output!r} into {target!r}, and it has no such")
            if not _fits(found[output], inputs[target], part.dynamic.get(target, {})):
                taken, made = _type(inputs[target]), _type(found[output])
                raise UsageError(f"{where}: its loop carries {output!r}, {made}, into {target!r}, which takes {taken}")
            inputs[target] = found[output]
    return found


def _fits(made: torch.Tensor, taken: torch.Tensor, dynamic: Iterable[int]) -> bool:
    """Whether both have one type and, but for the `dynamic` axes, one shape."""
    if made.dtype != taken.dtype or made.dim() != taken.dim():
        return False
    moving = {axis % taken.dim() for axis in dynamic if taken.dim()}
    return all(
        axis in moving or one == other for axis, (one, other) in enumerate(zip(made.shape, taken.shape, strict=True))
    )


def _type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _components(file: Path, function: str) -> dict[str, Component]:
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    try:
        with running(file, "components") as module:
            make: Any = getattr(module, function, None)
            if not callable(make):
                raise UsageError(f"{file}: has no function {function!r}; name another with {file}:FUNCTION")
            found = make()
    except BuilderError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UsageError(f"{file}: does not run: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping) or not found or not all(isinstance(each, Component) for each in found.values()):
        raise UsageError(
            f"{file}:{function} must return components by name: {{'vision': trt_nvfp4.Component(...), ...}}"
        )
    return dict(found)
