"""What a plan, report, rewritten model, bundle or engine holds, as tables; needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, cast

from rich.filesize import decimal
from rich.table import Table

from trt_nvfp4.builder.components.manifest import FILE as PARTS
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.tables import manifest_tables
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.report import report
from trt_nvfp4.builder.report.interface import interface
from trt_nvfp4.builder.report.json_types import misfits
from trt_nvfp4.builder.tensorrt import build_script, bundle
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.ops import DOMAIN


class PlannedInBundle(TypedDict):
    """What is used of a subgraph in a bundle's manifest."""

    name: str
    decision: str
    engine_nodes: list[str]


class BundleManifest(TypedDict):
    """What is used of a bundle's manifest; the rest is shown as it is."""

    model: str
    planned: list[PlannedInBundle]
    checksums: dict[str, str]
    target: Any
    arch: Any
    modules: Any
    profiles: Any
    plugin_library: Any
    plugin_sources: Any


MANIFEST_SHOWN = ("target", "arch", "modules", "profiles", "plugin_library", "plugin_sources")
# A report of the build script alone has the number of layers.
BUILD_RESULT = {
    "target",
    "backend",
    "engine",
    "engine_bytes",
    "engine_sha256",
    "engine_layers",
    "plugin_layers",
    "subgraphs",
}


def inspect(path: Path) -> dict[str, Any]:
    """Describe a file or bundle folder: `kind` and what is known.

    Raises BuilderError: model for what is missing or broken, usage for what is something else.
    """
    if path.is_dir() and (path / PARTS).is_file():
        return _parts(path)
    if path.is_dir():
        return _bundle(path)
    if not path.exists():
        raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file or folder")
    kinds = {".yaml": _plan, ".yml": _plan, ".json": _report, ".onnx": _model, ".engine": _engine, ".plan": _engine}
    if path.suffix not in kinds:
        raise BuilderError(
            USAGE, f"{path}: expected a plan (.yaml), report (.json), model (.onnx), engine or bundle folder"
        )
    return kinds[path.suffix](path)


def _plan(path: Path) -> dict[str, Any]:
    plan = Plan.load(path)
    found = report.Report(model=plan.model, target=plan.target)
    found.take_plan(plan, calibrated=True)
    return {"kind": "plan", "model": plan.model, "target": plan.target, "subgraphs": found.subgraphs}


def _report(path: Path) -> dict[str, Any]:
    if built := _built_from_bundle(path):
        return {"kind": "report", **built}
    return {"kind": "report", **report.load(path)}


def _built_from_bundle(path: Path) -> dict[str, Any] | None:
    """What a bundle's build script reported, which knows the engine and not the plan; None for any other file."""
    try:
        data = parse_json(path.read_text())
    except ValueError:
        return None
    if not isinstance(data, dict) or not data.keys() >= BUILD_RESULT:
        return None
    if misfits(data, {"subgraphs": list[dict[str, str | None]]}):
        return None
    built = {entry["name"]: entry["realized"] for entry in data["subgraphs"]}
    return {**{key: value for key, value in data.items() if key != "subgraphs"}, "built": built}


def _model(path: Path) -> dict[str, Any]:
    proto = read(path)
    plugins = [node for node in proto.graph.node if node.domain == DOMAIN]
    inputs, outputs = interface(proto)
    return {
        "kind": "model",
        "opset": {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        "inputs": inputs,
        "outputs": outputs,
        "operators": dict(Counter(node.op_type for node in proto.graph.node).most_common()),
        "plugin_nodes": {node.name: node.op_type for node in plugins},
    }


def _bundle(path: Path) -> dict[str, Any]:
    data = read_manifest(path)
    changed = changed_files(path, data["checksums"])
    files = {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
    shown: dict[str, Any] = {key: value for key, value in data.items() if key in MANIFEST_SHOWN}
    shown["planned"] = {
        entry["name"]: f"{entry['decision']} in {', '.join(entry['engine_nodes'])}" for entry in data["planned"]
    }
    return {"kind": "bundle", **shown, "files": files, "changed_files": changed}


def _parts(path: Path) -> dict[str, Any]:
    manifest = Manifest.load(path)
    built: dict[str, Any] = {}
    for part in manifest.parts:
        engine = path / f"{part.name}.engine"
        if engine.is_file():
            built[part.name] = f"{engine.name}, {engine.stat().st_size} bytes"
        elif (path / part.name / bundle.MANIFEST).is_file():
            built[part.name] = f"{part.name}/, a bundle"
        else:
            built[part.name] = "no engine yet"
    return {"kind": "parts", "manifest": asdict(manifest), "built": built}


def read_manifest(folder: Path) -> BundleManifest:
    """What a bundle says of itself. Raises BuilderError: usage for a folder that is none, model for a broken one."""
    manifest = folder / bundle.MANIFEST
    if not manifest.is_file():
        raise BuilderError(USAGE, f"{folder}: not a bundle (it has no {bundle.MANIFEST})")
    try:
        data = parse_json(manifest.read_text())
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


def _engine(path: Path) -> dict[str, Any]:
    """An engine's layers need the target's GPU to be read; without one its report says what was verified."""
    beside = build_script.report_file(path)
    if not path.stat().st_size:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: empty, and no engine; build it again, or copy it again")
    found: dict[str, Any] = {"kind": "engine", "bytes": path.stat().st_size}
    if not beside.exists():
        return {
            **found,
            "note": f"layers cannot be read without the target's GPU, and there is no {beside.name} beside it",
        }
    data = _report(beside)
    if data["engine_sha256"] is None:
        return {**found, "note": f"{beside.name} is of a later run, which built no engine"}
    # The digest: engines of one architecture are often of one size.
    if data["engine_bytes"] != found["bytes"] or data["engine_sha256"] != build_script.sha256(path):
        return {**found, "note": f"{beside.name} is of another engine ({data['engine_bytes']} bytes)"}
    return {**data, **found, "note": f"as verified when it was built ({beside.name}); layers need the target's GPU"}


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """What `inspect` found, for the terminal."""
    if found["kind"] == "parts":
        yield from manifest_tables(Manifest.of(found["manifest"]))
        found = {"kind": found["kind"], "built": found["built"]}
    subgraphs = found.get("subgraphs")
    if subgraphs is not None:
        yield from report.subgraph_tables(subgraphs)
        if found["kind"] in ("report", "engine"):
            yield report.summary_table(found)
    rest = Table(show_header=False, box=None)
    for key, value in found.items():
        if key == "bytes":
            rest.add_row(key, decimal(value))
        elif subgraphs is None or key in ("kind", "note", "model") or (key == "target" and found["kind"] == "plan"):
            rest.add_row(key, _text(value))
    yield rest


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {entry}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(str(entry) for entry in value) or "none"
    return str(value)
