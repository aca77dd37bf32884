"""Reads what a plan, report, rewritten model, bundle or engine holds; needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypedDict, cast, get_type_hints

from trt_nvfp4.builder.components.manifest import FILE as PARTS
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.parallel.manifest import FILE as RANKS
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.prediction import shown
from trt_nvfp4.builder.report import report
from trt_nvfp4.builder.report.inspected import (
    DeviceBuild,
    InspectedBundle,
    InspectedEngine,
    InspectedModel,
    InspectedParts,
    InspectedPlan,
    InspectedRanks,
    InspectedReport,
    Inspection,
)
from trt_nvfp4.builder.report.interface import interface
from trt_nvfp4.builder.report.json_types import misfits
from trt_nvfp4.builder.tensorrt import build_script, bundle
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.ops import DOMAIN


class PlannedInBundle(TypedDict):
    """What is used of a subgraph in a bundle's manifest."""

    name: str
    decision: str
    engine_nodes: list[str]


class BundleManifest(TypedDict):
    """What is used of a bundle's manifest. `modules`: TensorRT's packages that can build it, and their oldest versions;
    `profiles`: by input, min, opt and max shape."""

    model: str
    planned: list[PlannedInBundle]
    checksums: dict[str, str]
    target: str
    arch: str
    modules: dict[str, str]
    profiles: list[dict[str, list[list[int]]]]
    plugin_library: str | None
    plugin_sources: str | None


# What the build script's report says of its engine, and of its subgraphs.
BUILD_RESULT = {each.name for each in fields(DeviceBuild)} - {"built", "others"} | {"subgraphs"}
_BUILT_TYPES = {name: kind for name, kind in get_type_hints(DeviceBuild).items() if name not in ("built", "others")} | {
    "subgraphs": list[dict[str, str | None]]
}


def inspect(path: Path) -> Inspection:
    """What a file or folder holds, by its kind.

    Raises BuilderError: model for what is missing or broken, usage for what is something else.
    """
    if path.is_dir() and (path / PARTS).is_file():
        return _parts(path)
    if path.is_dir() and (path / RANKS).is_file():
        return _ranks(path)
    if path.is_dir():
        return _bundle(path)
    if not path.exists():
        raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file or folder")
    kinds: dict[str, Callable[[Path], Inspection]] = {
        **dict.fromkeys((".yaml", ".yml"), _plan),
        **dict.fromkeys((".engine", ".plan"), _engine),
        ".json": lambda file: InspectedReport(_report(file)),
        ".onnx": _model,
    }
    if path.suffix not in kinds:
        raise BuilderError(
            USAGE, f"{path}: expected a plan (.yaml), report (.json), model (.onnx), engine or bundle folder"
        )
    return kinds[path.suffix](path)


def _plan(path: Path) -> InspectedPlan:
    plan = Plan.load(path)
    found = report.Report(model=plan.model, target=plan.target)
    found.take_plan(plan, calibrated=True)
    return InspectedPlan(plan.model, plan.target, found.subgraphs)


def _report(path: Path) -> report.Report | DeviceBuild:
    return _built_from_bundle(path) or report.load(path)


def _built_from_bundle(path: Path) -> DeviceBuild | None:
    """What a bundle's build script reported; None for any other file."""
    try:
        data = read_json(path)
    except ValueError:
        return None
    if not isinstance(data, dict) or not data.keys() >= BUILD_RESULT or misfits(data, _BUILT_TYPES):
        return None
    own = {name: data[name] for name in BUILD_RESULT - {"subgraphs"}}
    built = {entry["name"]: entry["realized"] for entry in data["subgraphs"]}
    return DeviceBuild(**own, built=built, others={name: data[name] for name in data.keys() - BUILD_RESULT})


def _model(path: Path) -> InspectedModel:
    proto = read(path)
    plugins = [node for node in proto.graph.node if node.domain == DOMAIN]
    inputs, outputs = interface(proto)
    return InspectedModel(
        opset={entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        inputs=inputs,
        outputs=outputs,
        operators=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
        plugin_nodes={node.name: node.op_type for node in plugins},
    )


def _bundle(path: Path) -> InspectedBundle:
    data = read_manifest(path)
    return InspectedBundle(
        target=data["target"],
        arch=data["arch"],
        modules=data["modules"],
        profiles=data["profiles"],
        plugin_library=data["plugin_library"],
        plugin_sources=data["plugin_sources"],
        planned={
            entry["name"]: f"{entry['decision']} in {', '.join(entry['engine_nodes'])}" for entry in data["planned"]
        },
        files={str(file.relative_to(path)): file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()},
        changed_files=changed_files(path, data["checksums"]),
    )


def _ranks(path: Path) -> InspectedRanks:
    """Raises BuilderError (model) for ranks that do not fit together."""
    found = RankFolder.read(path)
    return InspectedRanks(
        target=found.target,
        tp=found.count,
        ep=found.spread,
        models={str(file.relative_to(path)): file.stat().st_size for file in found.models()},
        several_gpus=None if found.prediction is None else shown(found.prediction),
    )


def _parts(path: Path) -> InspectedParts:
    manifest = Manifest.load(path)
    built = {}
    for part in manifest.parts:
        engine = path / f"{part.name}.engine"
        if engine.is_file():
            built[part.name] = f"{engine.name}, {engine.stat().st_size} bytes"
        elif (path / part.name / bundle.MANIFEST).is_file():
            built[part.name] = f"{part.name}/, a bundle"
        else:
            built[part.name] = "no engine yet"
    return InspectedParts(manifest, built)


def read_manifest(folder: Path) -> BundleManifest:
    """What a bundle says of itself. Raises BuilderError: usage for a folder that is none, model for a broken one."""
    manifest = folder / bundle.MANIFEST
    if not manifest.is_file():
        raise BuilderError(USAGE, f"{folder}: not a bundle (it has no {bundle.MANIFEST})")
    try:
        data = read_json(manifest)
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{manifest}: not JSON ({error}); copy the bundle again") from error
    needed = BundleManifest.__annotations__.keys()
    if not isinstance(data, dict) or needed - data.keys():
        raise BuilderError(USAGE, f"{folder}: not a bundle (its {bundle.MANIFEST} is something else's)")
    if wrong := misfits(data, BundleManifest):
        raise BuilderError(MODEL_AT_FAULT, f"{manifest}: {wrong[0]}; copy the bundle again")
    return cast(BundleManifest, data)


def changed_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """The files of a bundle that are missing or not as they were when it was written."""
    try:
        files = {name: inside(folder, name) for name in checksums}
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{folder / bundle.MANIFEST}: {error}; copy the bundle again") from error
    return [
        name
        for name, digest in checksums.items()
        if not files[name].is_file() or build_script.sha256(files[name]) != digest
    ]


def _engine(path: Path) -> InspectedEngine:
    """An engine's layers need the target's GPU to be read; without one its report says what was verified."""
    beside, size = build_script.report_file(path), path.stat().st_size
    if not size:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: empty, and no engine; build it again, or copy it again")
    if not beside.exists():
        note = f"layers cannot be read without the target's GPU, and there is no {beside.name} beside it"
        return InspectedEngine(size, note)
    built = _report(beside)
    if built.engine_sha256 is None:
        return InspectedEngine(size, f"{beside.name} is of a later run, which built no engine")
    # The digest: engines of one architecture are often of one size.
    if built.engine_bytes != size or built.engine_sha256 != build_script.sha256(path):
        return InspectedEngine(size, f"{beside.name} is of another engine ({built.engine_bytes} bytes)")
    note = f"as verified when it was built ({beside.name}); layers need the target's GPU"
    return InspectedEngine(size, note, built)
