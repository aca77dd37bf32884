"""Opens the runner of a decoder by its file or folder. Bundles carry this module."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from ..errors import ModelFaultError, UsageError
from ..model.decoder_contract import TOKENIZER, tokenizer_beside
from ..model.model_files import ENGINES, is_model_directory
from .runner import SlotRunner

#: Runners of decoders; auto: the one that the file is made for.
RunnerName = Literal["auto", "tensorrt", "onnxruntime", "torch"]


def prepared(path: Path, made: ExitStack, task: str = "generate", max_batch: int | None = None) -> Path:
    """`path`, or the ONNX model that a Hugging Face directory is exported to, in a scratch folder that `made` removes.

    `task` as for `export`. No code of the directory runs. Raises BuilderError as `export` does.
    """
    if not is_model_directory(path):
        return path
    from trt_nvfp4.common.replacing import scratch

    from ..export.huggingface import export
    from ..export.tokenizer_files import copy_tokenizer
    from ..model.decoder_contract import CacheOptions

    folder = made.enter_context(scratch(None))
    copy_tokenizer(path, folder / TOKENIZER)
    return export(path, folder / "model.onnx", task, CacheOptions(max_batch=max_batch))


# Manifests of models of several parts and of ranks; bundles of decoders lack the modules that read them.
_PARTS = "components.json"
_RANKS = "parallel.json"


def opened(
    path: Path, made: ExitStack, manifest: Path | None = None, runner: RunnerName = "auto"
) -> tuple[SlotRunner, Path]:
    """The runner of `path`, a Hugging Face directory or the ranks of a split model too, and the file or folder that it
    runs; messages name `path`.

    `made` closes the runner and removes an export. Raises BuilderError as `prepared`, `open_runner` and
    `parallel.runner.open_ranks` do.
    """
    if (path / _RANKS).is_file():
        from .ranks_runner import open_ranks

        ranks = open_ranks(path, made, runner)
        made.callback(ranks.close)
        return ranks, path
    model = prepared(path, made)
    found = open_runner(model, manifest, runner)
    made.callback(found.close)
    found.name = found.name.replace(str(model), str(path))
    return found, model


def open_runner(path: Path, manifest: Path | None = None, runner: RunnerName = "auto") -> SlotRunner:
    """The runner of an engine, an ONNX model, or a bundle: its engine once that is built, its model before.

    `runner`: auto takes TensorRT for an engine and ONNX Runtime, on the CPU, for a model. onnxruntime and torch, which
    runs the plugins on any NVIDIA GPU, take an engine's rewritten model from beside it. `manifest`: of the bundle that
    an engine was built from, where it lies elsewhere. Raises BuilderError: usage for something else, model for what is
    missing, broken or no decoder with caches, unavailable for an engine that cannot run here.
    """
    if not path.exists():
        raise ModelFaultError(f"{path}: no such file or folder")
    if path.is_dir():
        return open_runner(_of_folder(path, runner), runner=runner)
    if path.suffix in ENGINES and runner in ("auto", "tensorrt"):
        from .tensorrt_runner import open_engine

        return open_engine(path, manifest)
    if path.suffix in ENGINES:
        return open_runner(_rewritten(path, runner), runner=runner)
    if path.suffix != ".onnx":
        raise UsageError(
            f"{path}: expected an engine (.engine), an ONNX file, a bundle folder or a Hugging Face directory"
        )
    if runner == "tensorrt":
        raise UsageError(f"--runner tensorrt runs engines, and {path} is an ONNX model; build it first (build-engine)")
    if runner == "torch":
        from .torch_runner import TorchRunner

        return TorchRunner(path)
    from .onnx_runner import OnnxRunner

    return OnnxRunner(path)


def _rewritten(engine: Path, runner: str) -> Path:
    model = engine.with_suffix(".rewritten.onnx")
    if not model.is_file():
        raise ModelFaultError(
            f"--runner {runner} runs the rewritten model of an engine, and {model} is not there; give an ONNX model"
        )
    return model


def tokenizer_folder(path: Path) -> Path:
    """Where the tokenizer of an engine, model, bundle or Hugging Face directory lies."""
    if is_model_directory(path):
        return path
    return path / TOKENIZER if path.is_dir() else tokenizer_beside(path)


def _of_folder(folder: Path, runner: str) -> Path:
    if (folder / _RANKS).is_file():
        raise UsageError(f"{folder}: holds the ranks of a model, which run together")
    if (folder / _PARTS).is_file():
        raise UsageError(f"{folder}: holds the parts of a model, which trt_nvfp4.Pipeline runs in Python")
    from ..tensorrt.bundle_manifest import read_manifest

    manifest = read_manifest(folder)
    engine = folder / str(manifest.get("engine", ""))
    wanted = runner == "tensorrt" or (runner == "auto" and engine.is_file())
    return engine if wanted else folder / str(manifest["model"])
