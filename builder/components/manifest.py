"""The parts of a model and the tensors that flow between them: `components.json` beside them.

Imports only Python's library and the errors: the device reads manifests, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.components.settings import call_problems, problems
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.common.json_text import read_json

FILE = "components.json"
FORMAT = 1
#: The task of parts that diffusers' own pipeline calls.
DIFFUSE = "diffuse"
#: What a model of parts does: `run` computes its outputs once, `generate` makes tokens with a decoder.
TASKS = ("run", "generate", DIFFUSE)


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a part or comes out: type as ONNX spells it in lower case, and dimensions, a number or
    the name of a dynamic one."""

    dtype: str
    shape: Sequence[int | str]

    def takes(self, other: Port) -> bool:
        """Whether a tensor of `other` fits in here."""
        same = len(self.shape) == len(other.shape) and self.dtype == other.dtype
        return same and all(
            a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(self.shape, other.shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Flow:
    """The output `source` of a part, "part.tensor", is the input `target` of another."""

    source: str
    target: str


@dataclass(frozen=True)
class Loop:
    """A part that runs `times` in a row: each run's output goes into the next (`carry`: output -> input), and numbers
    of each run are given to it (`values`: input -> one number per run)."""

    times: int
    carry: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One graph: `name`.onnx, and what is made of it."""

    name: str
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    loop: Loop | None = None


@dataclass(frozen=True)
class Manifest:
    """Parts in the order in which they run. `settings`: of the task (see `settings.py`)."""

    task: str
    parts: Sequence[Part]
    flows: Sequence[Flow] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def part(self, name: str) -> Part:
        found = next((part for part in self.parts if part.name == name), None)
        if found is None:
            raise ModelFaultError(f"{FILE}: there is no part {name!r}; it has {_names(self.parts)}")
        return found

    def sources(self, part: Part) -> dict[str, str]:
        """Input of the part -> the "part.tensor" that it comes from, for inputs that another part makes."""
        prefix = f"{part.name}."
        return {flow.target.removeprefix(prefix): flow.source for flow in self.flows if flow.target.startswith(prefix)}

    def given(self) -> dict[str, Port]:
        """The inputs of the whole. Inputs of one name in several parts are one."""
        found: dict[str, Port] = {}
        for part in self.parts:
            loop = part.loop or Loop(1)
            for name in part.inputs.keys() - self.sources(part).keys() - loop.values.keys():
                found[name] = part.inputs[name]
        return found

    def results(self) -> dict[str, Port]:
        """The outputs of the whole, "part.tensor": what no other part takes."""
        taken = {flow.source for flow in self.flows}
        return {
            f"{part.name}.{name}": port
            for part in self.parts
            for name, port in part.outputs.items()
            if f"{part.name}.{name}" not in taken
        }

    def check(self, where: str = FILE) -> Manifest:
        """The manifest itself. Raises ModelFaultError for parts that do not fit each other."""
        for problem in self._problems():
            raise ModelFaultError(f"{where}: {problem}")
        return self

    def _problems(self) -> Iterator[str]:
        if self.task not in TASKS:
            yield f"the task is {self.task!r}, expected {' or '.join(TASKS)}"
        names = [part.name for part in self.parts]
        if not names:
            yield "there is no part"
        for name in names:
            if names.count(name) > 1:
                yield f"two parts are called {name!r}"
            if not name.replace("_", "").isalnum():
                yield f"a part is called {name!r}; expected letters, digits and _"
        for flow in self.flows:
            yield from self._flow_problems(flow, names)
        yield from problems(self.settings)
        for part in self.parts:
            yield from _loop_problems(part)
        if self.task == DIFFUSE:  # each part is called by itself
            shapes = {part.name: {name: port.shape for name, port in part.inputs.items()} for part in self.parts}
            yield from call_problems(self.settings.get("calls"), shapes)
            return
        ports: dict[str, tuple[str, Port]] = {}
        for part in self.parts:
            for name, port in part.inputs.items():
                if name in self.sources(part) or (part.loop is not None and name in part.loop.values):
                    continue
                other, known = ports.setdefault(name, (part.name, port))
                if not known.takes(port):
                    yield f"{other} and {part.name} both take the input {name}, as {known} and as {port}"

    def _flow_problems(self, flow: Flow, names: Sequence[str]) -> Iterator[str]:
        found: list[Port] = []
        for end, ports in ((flow.source, "outputs"), (flow.target, "inputs")):
            part, _, tensor = end.partition(".")
            if part not in names:
                yield f"flow {flow.source} -> {flow.target}: the part {part!r} is missing; it has {', '.join(names)}"
                return
            port = getattr(self.part(part), ports).get(tensor)
            if port is None:
                has = ", ".join(getattr(self.part(part), ports)) or "none"
                yield f"flow {flow.source} -> {flow.target}: {part} has no {ports[:-1]} {tensor!r}; it has {has}"
                return
            found.append(port)
        source, target = (end.partition(".")[0] for end in (flow.source, flow.target))
        if names.index(source) >= names.index(target):
            yield f"flow {flow.source} -> {flow.target}: {source} runs after {target}; list it before"
        if not found[1].takes(found[0]):
            yield f"flow {flow.source} -> {flow.target}: {found[0]} does not fit {found[1]}"

    def save(self, folder: Path) -> Path:
        path = folder / FILE
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")
        return path

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises BuilderError: usage for a folder without a manifest, model for one that cannot be read or does not fit
        together."""
        path = folder / FILE
        if not folder.exists():
            raise ModelFaultError(f"{folder}: no such file or folder")
        if not path.is_file():
            raise UsageError(f"{folder}: holds no parts of a model (it has no {FILE})")
        try:
            found = read_json(path)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, expected {FORMAT}")
            manifest = cls.of(found)
        except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            raise ModelFaultError(f"{path}: cannot be read ({error!r}); build the model again") from error
        return manifest.check(str(path))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Manifest:
        """From JSON. Raises ValueError, OverflowError, KeyError, TypeError or AttributeError for anything else."""
        parts = [
            Part(
                str(part["name"]),
                {name: _port(port) for name, port in part["inputs"].items()},
                {name: _port(port) for name, port in part["outputs"].items()},
                None if part["loop"] is None else _loop(part["loop"]),
            )
            for part in found["parts"]
        ]
        flows = [Flow(str(flow["source"]), str(flow["target"])) for flow in found["flows"]]
        return cls(found["task"], parts, flows, dict(found["settings"]), str(found["model"]))


def _port(found: Mapping[str, Any]) -> Port:
    shape = found["shape"]
    if not isinstance(found["dtype"], str) or not all(isinstance(dim, (int, str)) for dim in shape):
        raise ValueError(f"{found} is not a tensor")
    return Port(found["dtype"], tuple(shape))


def _loop(found: Mapping[str, Any]) -> Loop:
    values = {str(name): [float(number) for number in numbers] for name, numbers in found["values"].items()}
    return Loop(int(found["times"]), {str(a): str(b) for a, b in found["carry"].items()}, values)


def _loop_problems(part: Part) -> Iterator[str]:
    loop = part.loop
    if loop is None:
        return
    if loop.times < 1:
        yield f"{part.name} runs {loop.times} times, expected 1 or more"
    for output, target in loop.carry.items():
        if output not in part.outputs or target not in part.inputs:
            yield f"{part.name}: output {output!r} cannot go into its input {target!r}: it has no such"
        elif not part.inputs[target].takes(part.outputs[output]):
            yield f"{part.name}: output {output}, {part.outputs[output]}, does not fit its input {target}, " + str(
                part.inputs[target]
            )
    for name, numbers in loop.values.items():
        if name not in part.inputs:
            yield f"{part.name}: has no input {name!r} to give numbers to"
        elif any(isinstance(dim, str) for dim in part.inputs[name].shape):
            yield f"{part.name}: the input {name}, {part.inputs[name]}, is given numbers and has no fixed shape"
        elif len(numbers) != loop.times:
            yield f"{part.name}: {len(numbers)} numbers for {name}, and it runs {loop.times} times"


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(part.name for part in parts)
