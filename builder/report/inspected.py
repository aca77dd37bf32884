"""Results of `inspect`, a type for each kind of file, as JSON and as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from rich.filesize import decimal
from rich.table import Table

from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.records.contents import ReportedSubgraph
from trt_nvfp4.builder.report import report
from trt_nvfp4.builder.report.parts_tables import manifest_tables
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.terminal.tables import equal_rows


@dataclass(frozen=True)
class InspectedPlan:
    """A plan, none of whose subgraphs is built."""

    model: str
    target: str
    subgraphs: Sequence[ReportedSubgraph]
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True)
class DeviceBuild:
    """The report of a bundle's script about the engine that it built; of the plan it knows only the subgraphs' names.

    `engine` and its facts are None for a run that built none. `built`: by subgraph, its layers in the engine in words.
    `others`: further entries of the report, which are only shown.
    """

    target: str
    backend: str
    engine: str | None
    engine_bytes: int | None
    engine_sha256: str | None
    engine_layers: int
    plugin_layers: int
    built: Mapping[str, str | None]
    others: Mapping[str, Any]


@dataclass(frozen=True)
class InspectedReport:
    """The report of a build here or, with the script of a bundle, on a device."""

    report: Report | DeviceBuild
    kind: Literal["report"] = "report"


@dataclass(frozen=True)
class InspectedModel:
    """An ONNX file: versions of operator sets by domain, inputs and outputs in words (`int64 [batch, sequence]`), how
    many nodes of each operator there are, and the operators of plugin nodes by their names."""

    opset: Mapping[str, int]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    operators: Mapping[str, int]
    plugin_nodes: Mapping[str, str]
    kind: Literal["model"] = "model"


@dataclass(frozen=True)
class InspectedBundle:
    """A bundle: its manifest, the bytes of its `files`, and those that have changed.

    `modules`: TensorRT's packages that can build it, and their oldest versions; `profiles`: by input, min, opt and max
    shape; `planned`: by subgraph, the decision and the nodes of the engine that hold it.
    """

    target: str
    arch: str
    modules: Mapping[str, str]
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]
    plugin_library: str | None
    plugin_sources: str | None
    planned: Mapping[str, str]
    files: Mapping[str, int]
    changed_files: Sequence[str]
    kind: Literal["bundle"] = "bundle"


@dataclass(frozen=True)
class InspectedParts:
    """A model of several graphs; `built`: by part, its engine or bundle in words."""

    manifest: Manifest
    built: Mapping[str, str]
    kind: Literal["parts"] = "parts"


@dataclass(frozen=True)
class InspectedRanks:
    """A model that is split over `tp` GPUs, experts over `ep` shares; the bytes of the ranks' `models`, which fit
    together, and whether several GPUs pay, in words."""

    target: str
    tp: int
    ep: int
    models: Mapping[str, int]
    several_gpus: str | None
    kind: Literal["ranks"] = "ranks"


@dataclass(frozen=True)
class InspectedEngine:
    """An engine of so many `bytes`. Its layers cannot be read without the target's GPU: `report` is that of its build,
    None without one beside it, as `note` says."""

    bytes: int
    note: str
    report: Report | DeviceBuild | None = None
    kind: Literal["engine"] = "engine"


Inspection: TypeAlias = (
    InspectedPlan
    | InspectedReport
    | InspectedModel
    | InspectedBundle
    | InspectedParts
    | InspectedRanks
    | InspectedEngine
)


def as_dict(found: Inspection) -> dict[str, Any]:
    """For JSON: `kind` and what is known; what a report says stands beside it."""
    if isinstance(found, InspectedReport | InspectedEngine):
        return _shown(found.report) | {each.name: getattr(found, each.name) for each in _own_fields(found)}
    return asdict(found)


def _own_fields(found: InspectedReport | InspectedEngine) -> list[Any]:
    return [each for each in fields(found) if each.name != "report"]


def _shown(built: Report | DeviceBuild | None) -> dict[str, Any]:
    if built is None:
        return {}
    shown = asdict(built)
    others: dict[str, Any] = shown.pop("others", {})
    return others | shown


def tables(found: Inspection) -> Iterator[Table]:
    """For the terminal."""
    rest = Table(show_header=False, box=None)
    shown = as_dict(found)
    if isinstance(found, InspectedPlan):
        yield from report.subgraph_tables(found.subgraphs)
        shown = {key: shown[key] for key in ("kind", "model", "target")}
    elif isinstance(found, InspectedReport | InspectedEngine) and isinstance(found.report, Report):
        yield from found.report.tables()
        shown = {"model": found.report.model} | {each.name: shown[each.name] for each in _own_fields(found)}
    elif isinstance(found, InspectedParts):
        yield from manifest_tables(found.manifest)
        shown = {"kind": found.kind, "built": found.built}
    elif isinstance(found, InspectedBundle):
        shown["profiles"] = [
            {name: report.range_text(shapes) for name, shapes in profile.items()} for profile in found.profiles
        ]
    for key, value in shown.items():
        rest.add_row(key.replace("_", " "), decimal(value) if key == "bytes" else _text(value))
    yield rest


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        rows = equal_rows((str(key), [_inline(entry)]) for key, entry in value.items())
        return "\n".join(f"{name}: {entry}" for name, (entry,), _ in rows) or "none"
    if isinstance(value, list):
        return "\n".join(_text(entry) for entry in value) or "none"
    return _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_inline, value)) or "none"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or type(value) is bool else str(value)
