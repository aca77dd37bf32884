"""Reads what a plan, report, rewritten model, bundle or engine holds; needs no GPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from trt_nvfp4.builder.components.manifest import FILE as PARTS
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.parallel.manifest import FILE as RANKS
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.prediction import shown
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.builder.records.json_types import misfits
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
from trt_nvfp4.builder.tensorrt import build_script
from trt_nvfp4.builder.tensorrt.bundle_manifest import changed_files, read_manifest
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.ops import DOMAIN

# What the build script's report says of its engine, and of its subgraphs.
BUILD_RESULT = {each.name for each in fields(DeviceBuild)} - {"built", "others"} | {"subgraphs"}
_BUILT_TYPES = {name: kind for name, kind in get_type_hints(DeviceBuild).items() if name not in ("built", "others")} | {
    "subgraphs": list[dict[str, str | None]]
}


def inspect(path: Path) -> Inspection:
    """The contents of a file or folder, by its kind.

    Raises ModelFaultError for a missing or broken file, UsageError for another kind.
    """
    if path.is_dir() and (path / PARTS).is_file():
        return _parts(path)
    if path.is_dir() and (path / RANKS).is_file():
        return _ranks(path)
    if path.is_dir() and not (path / MANIFEST).is_file():
        raise UsageError(f"{path}: expected a folder that build-engine wrote: a bundle, parts or ranks")
    if path.is_dir():
        return _bundle(path)
    if not path.exists():
        raise ModelFaultError(f"{path}: no such file or folder")
    kinds: dict[str, Callable[[Path], Inspection]] = {
        **dict.fromkeys((".yaml", ".yml"), _plan),
        **dict.fromkeys((".engine", ".plan"), _engine),
        ".json": lambda file: InspectedReport(_report(file)),
        ".onnx": _model,
    }
    if path.suffix not in kinds:
        raise UsageError(f"{path}: expected a plan (.yaml), report (.json), model (.onnx), engine or bundle folder")
    return kinds[path.suffix](path)


def _plan(path: Path) -> InspectedPlan:
    plan = Plan.load(path)
    found = report.Report(model=plan.model, target=plan.target)
    found.take_plan(plan, calibrated=True)
    return InspectedPlan(plan.model, plan.target, found.subgraphs)


def _report(path: Path) -> report.Report | DeviceBuild:
    return _built_from_bundle(path) or report.load(path)


def _built_from_bundle(path: Path) -> DeviceBuild | None:
    """The report of a bundle's build script; None for any other file."""
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
    """Raises ModelFaultError for ranks that do not fit together."""
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
        elif (path / part.name / MANIFEST).is_file():
            built[part.name] = f"{part.name}/, a bundle"
        else:
            built[part.name] = "no engine yet"
    return InspectedParts(manifest, built)


def _engine(path: Path) -> InspectedEngine:
    """An engine's layers need the target's GPU to be read; without one its report says what was verified."""
    beside, size = build_script.report_file(path), path.stat().st_size
    if not size:
        raise ModelFaultError(f"{path}: empty, and no engine; build it again, or copy it again")
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
