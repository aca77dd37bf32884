"""The folder that an engine is built from: model, plugin library, manifest and the script that builds and checks it.

Every build starts from such a folder; kept and moved to the device it is a bundle, for engines that this machine cannot
build.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from trt_nvfp4 import plugins
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, BuilderError
from trt_nvfp4.builder.export.decoder_contract import TOKENIZER, decoder_of
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.inputs.shapes import Profile
from trt_nvfp4.builder.onnx_file import check_plan, read, rewritten_by
from trt_nvfp4.builder.targets import MOE_LAYER_SINCE, NATIVE_NVFP4_SINCE, Target
from trt_nvfp4.builder.tensorrt import build_script
from trt_nvfp4.builder.tensorrt.preflight import attentions
from trt_nvfp4.builder.tensorrt.strip import strip
from trt_nvfp4.builder.tensorrt.verify import PlannedNodes
from trt_nvfp4.builder.tensorrt.weights_file import WeightsFile
from trt_nvfp4.common.external_data import external_files, rename
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.lowerings.registry import EngineLayers
from trt_nvfp4.graph_passes.lowerings.trt_moe import OP as NATIVE_MOE
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.ops import DOMAIN

SCRIPT = "build_engine.py"
GENERATE_SCRIPT = "generate.py"
MANIFEST = build_script.MANIFEST
#: The model that TensorRT reads where its plugins' weights are in a file of their own.
NETWORK = "network.onnx"
SOURCES = "sources"
#: The modules that the build script runs; they import no others.
MODULES = (
    *("builder/__init__.py", "builder/errors.py"),
    *(f"builder/tensorrt/{name}.py" for name in ("__init__", "backend", "build_script", "job", "network_checks")),
    *(f"builder/tensorrt/{name}.py" for name in ("verify", "weights_file")),
    *("errors.py", "common/__init__.py", "common/json_text.py", "common/replacing.py"),
    *(f"plugins/{name}.py" for name in ("__init__", "compile/__init__", "compile/ownership")),
)
#: Those that a decoder's generate.py runs, beside these and NumPy.
GENERATE_MODULES = (
    *(f"builder/tensorrt/{name}.py" for name in ("bound_weights", "load", "runtime_cache")),
    *(f"common/{name}.py" for name in ("cache_names", "limited", "model_config", "tokenizers")),
    *("builder/export/__init__.py", "builder/export/decoder_contract.py"),
    *(
        f"builder/generate/{name}.py"
        for name in (
            *("__init__", "caches", "cuda", "generator", "logits", "loop", "open", "sampling", "script"),
            *("tensorrt_runner", "tokenizer"),
        )
    ),
)


def _script(does: str, module: str, minor: int) -> str:
    """A script that runs `module.main` with the bundle's folder, by Python 3.`minor` or newer."""
    return f'''#!/usr/bin/env python3
"""{does}; --help lists the options."""

import sys

if sys.version_info < (3, {minor}):  # before what would not be understood
    found = ".".join(map(str, sys.version_info[:3]))
    enough = "3.{minor}"
    hint = f"run this with {{enough}} or newer, such as python{{enough}}"
    print(f"error: Python {{found}} is too old; {{hint}}", file=sys.stderr)
    sys.exit({UNAVAILABLE})

from dataclasses import asdict
from pathlib import Path

folder = Path(__file__).resolve().parent
sys.path.insert(0, str(folder / "{SOURCES}"))
try:
    from trt_nvfp4.builder.{module} import main
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("trt_nvfp4"):
        print(f"error: this needs the package {{error.name}}: pip install {{error.name}}", file=sys.stderr)
        sys.exit({UNAVAILABLE})
    print(f"error: {{folder / '{SOURCES}'}}: {{error}}; copy the whole bundle again", file=sys.stderr)
    sys.exit({MODEL_AT_FAULT})
sys.exit(main(folder))
'''


def planned_nodes(plan: Plan, model: Path) -> list[PlannedNodes]:
    """What the engine is checked against: for each replaced subgraph the nodes of `model` that carry it.

    Where weights alone are FP8, those are the DequantizeLinear nodes that read them and not the products. Raises
    BuilderError: usage where `model` was rewritten by another plan, model where it lacks a node that the rewrite made.
    """
    check_plan(model, plan)
    proto = read(model)
    followed = rewritten_by(model)
    nodes = {node.name: node for node in proto.graph.node}
    decoder = decoder_of(proto)
    caches = set() if decoder is None else set(decoder.caches)
    producers = {output: node for node in proto.graph.node for output in node.output}
    fp8 = {tensor.name for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN}

    def reads_fp8_activations(product: onnx.NodeProto) -> bool:
        # Other tools may have taken the quantization out of the model, not the note that the rewrite made of it.
        source = producers.get(product.input[0])
        dequantized = source is not None and source.op_type == "DequantizeLinear" and not fp8.isdisjoint(source.input)
        return dequantized or product.name in followed["quantized"]

    def dequantizing(product: onnx.NodeProto) -> str:
        source = producers.get(product.input[1])
        while source is not None and source.op_type != "DequantizeLinear":  # a Transpose, for one
            source = producers.get(source.input[0])
        return product.name if source is None else source.name

    entries = []
    for subgraph in plan.subgraphs:
        layers = subgraph.lowering.layers
        if layers is None:
            continue
        carriers, quantized = [], []
        for name in followed["realized"].get(subgraph.name, []):
            node = nodes.get(name)
            if node is None or not _carries(node, layers):
                raise BuilderError(MODEL_AT_FAULT, _changed(model, name, node, subgraph.name, layers))
            calibrated = layers.operands == "calibrated"
            if layers.operands == "both" or (calibrated and reads_fp8_activations(node)):
                quantized.append(name)
            carriers.append(dequantizing(node) if calibrated and name not in quantized else name)
        found = (layers.name, layers.shown, layers.carrier, layers.datatypes)
        updated = [
            port for name in carriers if layers.carrier == "plugin" for port in nodes[name].input if port in caches
        ]
        entries.append(PlannedNodes(subgraph.name, *found, tuple(carriers), tuple(quantized), tuple(updated)))
    return entries


def _carries(node: onnx.NodeProto, layers: EngineLayers) -> bool:
    if layers.carrier == "plugin":
        return node.domain == DOMAIN
    return node.op_type in ((NATIVE_MOE,) if layers.carrier == "moe_layer" else ("MatMul", "Gemm"))


def _changed(model: Path, name: str, node: onnx.NodeProto | None, subgraph: str, layers: EngineLayers) -> str:
    expected = {"plugin": "a plugin node", "moe_layer": NATIVE_MOE, "product": "a MatMul or Gemm"}[layers.carrier]
    found = "it has no such node" if node is None else f"it is of type {node.op_type}"
    return (
        f"{model}: node {name!r} should be {expected}, which carries {subgraph} in {layers.name}, and {found}: the "
        "model was changed after it was rewritten; rewrite the original model again"
    )


def write_folder(
    folder: Path,
    target: Target,
    model: Path,
    planned: Sequence[PlannedNodes],
    profiles: Sequence[Mapping[str, Profile]],
    library: Path | None,
    with_sources: bool = False,
    timing_cache: Path | None = None,
    keep: bool = False,
    link_weights: bool = True,
    embed_plugins: bool = True,
    stripped: bool = False,
    weight_streaming: bool = False,
    original: Path | None = None,
) -> Path:
    """Fill the existing, empty `folder`; returns the manifest's path.

    `library` is the plugin library; `with_sources` adds its sources instead, for nvcc on the device. A folder
    to `keep` holds a copy of the library, and checksums. `link_weights`: hard links to the model's files of weights,
    where the file system has them (see `share_weights`), instead of copies. With `embed_plugins` the engine will carry
    the library, otherwise it will lie beside the engine. `stripped`: the weights of plugins are not in the engine, but
    in a file beside it (see `strip`). `original`: the model that was rewritten, beside which the tokenizer may lie.

    Raises BuilderError (model) where a folder to keep lacks the tokenizer that the model states.
    """
    weights = strip(model, folder / "model.onnx", folder / NETWORK) if stripped else None
    if weights is None:
        _write_model(model, folder / "model.onnx", _link if link_weights else shutil.copy)
    if library is not None:
        (shutil.copy if keep else _link)(library, folder / library.name)
    if with_sources:
        ignore = shutil.ignore_patterns("__pycache__", "ops", "plugin_host", "host.py", "CMakeLists.txt", "py.typed")
        shutil.copytree(Path(plugins.__path__[0]), folder / SOURCES / "trt_nvfp4" / "plugins", ignore=ignore)
        op_header.ship(folder / SOURCES / "trt_nvfp4" / "plugins")
    proto = read(model)
    decoder = decoder_of(proto)
    _write_scripts(folder, generates=keep and decoder is not None and decoder.alone)
    if keep and decoder is not None and decoder.tokenizer is not None:
        sources = [place.parent / TOKENIZER for place in (model, original or model)]
        if not any(copy_tokenizer(source, folder / TOKENIZER) for source in sources):
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{model}: its tokenizer must lie in {sources[0]}, which holds no file of one; put its files there",
            )
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    # Every build adds to it, so that no checksum holds.
    if timing_cache is not None and timing_cache.exists():
        shutil.copy(timing_cache, folder / "timing.cache")
    manifest = {
        "format": 1,
        "target": target.name,
        "arch": target.arch,
        "compute_capability": target.compute_capability,
        "modules": _modules(target, planned),
        "model": "model.onnx",
        "engine": "model.engine",
        "weights": None if weights is None else _described(weights),
        "plugin_library": library.name if library else None,
        "plugin_sources": SOURCES if with_sources else None,
        "embed_plugins": embed_plugins,
        "weight_streaming": weight_streaming,
        "timing_cache": "timing.cache" if timing_cache is not None else None,
        "profiles": [{name: [p.least, p.typical, p.most] for name, p in one.items()} for one in profiles],
        "planned": [asdict(entry) for entry in planned],
        "attentions": {name: asdict(node) for name, node in attentions(proto).items()},
        "decoder": None if decoder is None else json.loads(decoder.json()),
        "caches": {} if decoder is None else dict(zip(decoder.caches, decoder.presents, strict=True)),
        "checksums": {str(file.relative_to(folder)): build_script.sha256(file) for file in files} if keep else {},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return path


def share_weights(model: Path, folder: Path) -> None:
    """Let the rewritten `model` read its weights in the bundle `folder` beside it, and remove its own file of them.

    The disk then holds them once. Two names of one file would too, but onnx loads no weights from a file that has
    other names.
    """
    shared = onnx.load(folder / "model.onnx", load_external_data=False)
    shared.functions.extend(onnx.load(model, load_external_data=False).functions)
    rename(shared, {name: f"{folder.name}/{name}" for name in external_files(shared, folder)})
    with replacing(model) as copy:
        onnx.save(shared, copy)
    model.with_name(f"{model.name}.data").unlink(missing_ok=True)


def _described(weights: WeightsFile) -> dict[str, Any]:
    inputs = [tensor.name for tensor in weights.tensors]
    return {"network": NETWORK, "file": weights.path.name, "digest": weights.digest, "inputs": inputs}


def _write_scripts(folder: Path, generates: bool) -> None:
    """The scripts, and the modules that they run."""
    (folder / SCRIPT).write_text(_script("Builds the engine of this folder, and checks it", "tensorrt.build_script", 9))
    if generates:
        (folder / GENERATE_SCRIPT).write_text(
            _script("Generates text with the engine of this folder", "generate.script", 10)
        )
    code = folder / SOURCES / "trt_nvfp4"
    for name in (*MODULES, *(GENERATE_MODULES if generates else ())):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_of(name), code / name)


def source_of(name: str) -> Path:
    """The file of a module of MODULES in this installation."""
    package, _, file = name.rpartition("/")
    module = importlib.import_module(".".join(["trt_nvfp4", *package.split("/")]).rstrip("."))
    return Path(module.__path__[0]) / file


def _modules(target: Target, planned: Sequence[PlannedNodes]) -> dict[str, str]:
    """The TensorRT packages that can build this plan, each with its oldest version."""
    decisions = {entry.decision for entry in planned}
    if Decision.NATIVE in decisions:
        return MOE_LAYER_SINCE
    if Decision.NATIVE_NVFP4 in decisions:
        return {module: NATIVE_NVFP4_SINCE[module] for module in target.modules}
    return target.modules


def _write_model(source: Path, destination: Path, place: Callable[[Path, Path], object]) -> None:
    proto = onnx.load(source, load_external_data=False)
    # The ops' function bodies serve ONNX Runtime. TensorRT's parser would inline them rather than take the plugin
    # (10.13 has no flag against it), so the model that it gets carries none and a missing plugin is an error.
    del proto.functions[:]
    files = external_files(proto, source.parent)
    names = {location: f"{destination.name}.{number}.data" for number, location in enumerate(files)}
    rename(proto, names)
    for location, file in files.items():
        place(file, destination.parent / names[location])
    onnx.save(proto, destination)


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy(source, destination)
