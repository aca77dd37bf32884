"""The folder that an engine is built from: model, plugin library, manifest and the script that builds and checks it.

Every build starts from such a folder; kept and moved to the device it is a bundle, for engines that this machine cannot
build.
"""

import importlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from trt_nvfp4 import plugins
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, ModelFaultError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.inputs.shapes import Profile
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, Decoder, decoder_of, tokenizer_beside
from trt_nvfp4.builder.model.onnx_file import check_plan, opened, rewritten_by
from trt_nvfp4.builder.records.bundle import ACCEPT_SCRIPT, MANIFEST, REFERENCE
from trt_nvfp4.builder.targets import NATIVE_NVFP4_SINCE, TRT_MOE_SINCE, Target
from trt_nvfp4.builder.tensorrt import build_script
from trt_nvfp4.builder.tensorrt.kernels import is_standard_op
from trt_nvfp4.builder.tensorrt.preflight import attentions
from trt_nvfp4.builder.tensorrt.strip import strip
from trt_nvfp4.builder.tensorrt.verify import PlannedNodes
from trt_nvfp4.builder.tensorrt.weights_file import WeightsFile
from trt_nvfp4.common.cache_names import is_state
from trt_nvfp4.common.external_data import external_files, rename
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.replacing import link_or_copy, replacing
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.lowerings.lowering import EngineLayers
from trt_nvfp4.graph_passes.lowerings.trt_moe import OP as TRT_MOE
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.ops import DOMAIN

SCRIPT = "build_engine.py"
GENERATE_SCRIPT = "generate.py"
#: The model that TensorRT reads where its plugins' weights are in a file of their own.
NETWORK = "network.onnx"
SOURCES = "sources"
#: The modules that the build script runs; they import no others.
MODULES = (
    *("builder/__init__.py", "builder/errors.py", "builder/cuda/__init__.py", "builder/cuda/driver.py"),
    *("builder/records/__init__.py", "builder/records/bundle.py"),
    *(f"builder/tensorrt/{name}.py" for name in ("__init__", "backend", "build_script", "job", "network_checks")),
    *(f"builder/tensorrt/{name}.py" for name in ("verify", "weights_file")),
    *("errors.py", "common/__init__.py", "common/json_text.py", "common/replacing.py"),
    *(f"plugins/{name}.py" for name in ("__init__", "compile/__init__", "compile/kernel_groups", "compile/ownership")),
)
#: Those that a decoder's generate.py runs, beside these and NumPy.
GENERATE_MODULES = (
    *(f"builder/tensorrt/{name}.py" for name in ("bound_weights", "load", "runtime_cache")),
    *(f"common/{name}.py" for name in ("cache_names", "limited", "model_config", "tokenizers")),
    "builder/cuda/runtime.py",
    *(f"builder/model/{name}.py" for name in ("__init__", "decoder_contract", "model_files")),
    *(
        f"builder/generate/{name}.py"
        for name in (
            *("__init__", "acceptance", "caches", "conversation", "generator", "logits", "loop", "open", "runner"),
            *("sampling", "script", "tensorrt_runner", "tokenizer"),
            *(
                f"drafts/{name}"
                for name in ("__init__", "drafter", "drafting", "gain", "model", "ngram", "open", "same_tokenizer")
            ),
        )
    ),
)


def script_of(does: str, module: str, minor: int) -> str:
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


def planned_nodes(plan: Plan, model: Path | OnnxFile) -> list[PlannedNodes]:
    """The nodes to check the engine against: for each replaced subgraph those of `model` that carry it.

    Where only weights are FP8, those are the DequantizeLinear nodes that read them and not the products. Raises
    BuilderError: usage where `model` was rewritten by another plan, model where it lacks a node that the rewrite made.
    """
    file = opened(model)
    check_plan(file, plan)
    proto, followed = file.proto, rewritten_by(file)
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
                raise ModelFaultError(_changed(file.path, name, node, subgraph.name, layers))
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
        return node.domain == DOMAIN or is_standard_op(node)
    return node.op_type in ((TRT_MOE,) if layers.carrier == "trt_moe" else ("MatMul", "Gemm"))


def _in_place(decoder: Decoder, proto: onnx.ModelProto) -> dict[str, str]:
    """(input, output) of what the engine must update at one address: caches, states of recurrence plugins, and those to
    which tokens are appended."""
    nodes = (node for node in proto.graph.node if is_standard_op(node) or node.op_type == "TensorScatter")
    updated = {name for node in nodes for name in node.input}
    ports = zip(decoder.caches, decoder.presents, strict=True)
    return {past: present for past, present in ports if not is_state(past) or past in updated}


def _changed(model: Path, name: str, node: onnx.NodeProto | None, subgraph: str, layers: EngineLayers) -> str:
    expected = {"plugin": "a plugin node", "trt_moe": TRT_MOE, "product": "a MatMul or Gemm"}[layers.carrier]
    found = "it has no such node" if node is None else f"it is of type {node.op_type}"
    return (
        f"{model}: node {name!r} should be {expected}, which carries {subgraph} in {layers.name}, and {found}: the "
        "model was changed after it was rewritten; rewrite the original model again"
    )


@dataclass(frozen=True)
class Plugins:
    """The plugins of an engine: their `library`, or its sources (`with_sources`) for nvcc on the device. `embed`: the
    engine will carry the library, which otherwise will lie beside it. `kernels`: names of the groups of kernels that
    the model's nodes need (see `kernels_of`)."""

    library: Path | None = None
    with_sources: bool = False
    embed: bool = True
    kernels: Sequence[str] = ()


@dataclass(frozen=True)
class FolderOptions:
    """How a folder is filled, and its engine built.

    A folder to `keep` holds a copy of the library, and checksums. `link_weights`: hard links to the model's files of
    weights, where the file system has them (see `share_weights`), instead of copies. `stripped`: the weights of plugins
    are not in the engine, but in a file beside it (see `strip`). `original`: the model that was rewritten, beside which
    the tokenizer may lie. `reference`: recorded text and logits, which accept.py holds the engine against.
    """

    keep: bool = False
    link_weights: bool = True
    stripped: bool = False
    weight_streaming: bool = False
    timing_cache: Path | None = None
    original: Path | None = None
    reference: Path | None = None


def write_folder(
    folder: Path,
    target: Target,
    model: Path | OnnxFile,
    planned: Sequence[PlannedNodes],
    profiles: Sequence[Mapping[str, Profile]],
    carried: Plugins | None = None,
    options: FolderOptions | None = None,
) -> Path:
    """Fill the existing, empty `folder`; returns the manifest's path. `carried`: the plugins, None for a model
    without any.

    Raises ModelFaultError where a folder to keep lacks the tokenizer that the model states.
    """
    file, own, options = opened(model), carried or Plugins(), options or FolderOptions()
    weights = strip(file.path, folder / "model.onnx", folder / NETWORK) if options.stripped else None
    if weights is None:
        _write_model(file, folder / "model.onnx", link_or_copy if options.link_weights else shutil.copy)
    if own.library is not None:
        (shutil.copy if options.keep else link_or_copy)(own.library, folder / own.library.name)
    if own.with_sources:
        ignore = shutil.ignore_patterns("__pycache__", "ops", "plugin_host", "host.py", "CMakeLists.txt", "py.typed")
        shutil.copytree(Path(plugins.__path__[0]), folder / SOURCES / "trt_nvfp4" / "plugins", ignore=ignore)
        op_header.ship(folder / SOURCES / "trt_nvfp4" / "plugins")
    proto = file.proto
    decoder = decoder_of(proto)
    if options.reference is not None:
        shutil.copy(options.reference, folder / REFERENCE)
    generates = options.keep and decoder is not None and decoder.alone
    _write_scripts(folder, generates, accepts=options.reference is not None)
    if options.keep and decoder is not None and decoder.tokenizer is not None:
        sources = [tokenizer_beside(place) for place in (file.path, options.original or file.path)]
        if not any(copy_tokenizer(source, folder / TOKENIZER) for source in sources):
            raise ModelFaultError(
                f"{file.path}: its tokenizer must lie in {sources[0]}, which holds no file of one; put its files there"
            )
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    # Every build adds to it, so that no checksum holds.
    if options.timing_cache is not None and options.timing_cache.exists():
        shutil.copy(options.timing_cache, folder / "timing.cache")
    manifest = {
        "format": 1,
        "target": target.name,
        "arch": target.arch,
        "compute_capability": target.compute_capability,
        "modules": _modules(target, planned),
        "model": "model.onnx",
        "engine": "model.engine",
        "weights": None if weights is None else _described(weights),
        "plugin_library": own.library.name if own.library else None,
        "kernels": list(own.kernels),
        "plugin_sources": SOURCES if own.with_sources else None,
        "embed_plugins": own.embed,
        "weight_streaming": options.weight_streaming,
        "timing_cache": "timing.cache" if options.timing_cache is not None else None,
        "profiles": [{name: [p.min, p.opt, p.max] for name, p in one.items()} for one in profiles],
        "planned": [asdict(entry) for entry in planned],
        "attentions": {name: asdict(node) for name, node in attentions(proto).items()},
        "decoder": None if decoder is None else json.loads(decoder.json()),
        "caches": {} if decoder is None else _in_place(decoder, proto),
        "checksums": {str(file.relative_to(folder)): build_script.sha256(file) for file in files}
        if options.keep
        else {},
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


_README = """# An engine's bundle

Made by trt-nvfp4. On the device that the engine is for, in this folder:

1. `python3 build_engine.py` builds `model.engine`, and checks it. It needs TensorRT's package for Python.
"""
_README_GENERATES = """2. `python3 generate.py --prompt "Once upon a time"` continues a text with it; `--help` lists the
   options. It needs numpy, cuda-bindings and, for text, transformers; `--ids 1,2,3` needs no transformers.
"""
_README_ACCEPTS = """3. `python3 accept.py` builds the engine, compares its logits with recorded ones, and writes
   `acceptance.json`, to attach to a report.
"""


def _write_scripts(folder: Path, generates: bool, accepts: bool) -> None:
    """The scripts, a page that says in which order they run, and the modules that they run."""
    pages = (_README, _README_GENERATES if generates else "", _README_ACCEPTS if accepts else "")
    (folder / "README.md").write_text("".join(pages))
    if accepts:
        script = script_of("Builds, runs and checks the engine of this folder", "generate.acceptance", 10)
        (folder / ACCEPT_SCRIPT).write_text(script)
    (folder / SCRIPT).write_text(script_of("Builds and checks the engine of this folder", "tensorrt.build_script", 9))
    if generates:
        (folder / GENERATE_SCRIPT).write_text(
            script_of("Generates text with the engine of this folder", "generate.script", 10)
        )
    write_modules(folder, (*MODULES, *(GENERATE_MODULES if generates else ())))


def write_modules(folder: Path, names: Iterable[str]) -> None:
    """The files of this package that a bundle's scripts run."""
    code = folder / SOURCES / "trt_nvfp4"
    for name in names:
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
    if Decision.TRT_MOE in decisions:
        return TRT_MOE_SINCE
    if Decision.NATIVE_NVFP4 in decisions:
        return {module: NATIVE_NVFP4_SINCE[module] for module in target.modules}
    return target.modules


def _write_model(source: OnnxFile, destination: Path, place: Callable[[Path, Path], object]) -> None:
    proto = source.copied()
    # The ops' function bodies serve ONNX Runtime. TensorRT's parser would inline them rather than take the plugin
    # (10.13 has no flag against it), so the model that it gets carries none and a missing plugin is an error.
    del proto.functions[:]
    files = external_files(proto, source.path.parent)
    names = {location: f"{destination.name}.{number}.data" for number, location in enumerate(files)}
    rename(proto, names)
    for location, file in files.items():
        place(file, destination.parent / names[location])
    onnx.save(proto, destination)
