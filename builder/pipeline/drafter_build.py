"""Builds a model and the drafter that `--draft` names: two engines, or a bundle in a bundle."""

from pathlib import Path
from typing import Any

import attrs

from trt_nvfp4.builder.components.source import is_of_parts
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.huggingface import export_head
from trt_nvfp4.builder.generate.drafts.same_tokenizer import check_same_tokenizer
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.model.decoder_contract import AUTO, IDS, CacheOptions
from trt_nvfp4.builder.model.model_files import check_config, is_eagle, is_model_directory
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request, part_of
from trt_nvfp4.builder.records.bundle import DRAFT
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.terminal.progress import Named, Progress, Silent
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.common.replacing import made_folder

#: What the drafter's files are called behind the model's name, and its part of the progress.
_SUFFIX = ".draft"


def run(request: Request, progress: Progress | None = None) -> Report:
    """Carry out a request, and one for its drafter where it has one; returns the model's report, whose files name those
    of the drafter. Raises what `pipeline.run` raises."""
    if request.draft == "none":
        return pipeline.run(request, progress)
    progress = progress or Silent()
    _check(request)
    drafter = _drafter(request, progress)
    report = pipeline.run(request, progress)
    found = pipeline.run(drafter, Named(progress, "drafter"))
    report.files |= {f"drafter's {name}": file for name, file in found.files.items()}
    report.warnings += [f"drafter: {text}" for text in found.warnings]
    if found.bundle is not None and report.bundle is not None:
        Path(found.bundle).rename(Path(report.bundle) / DRAFT)
        for name in (".rewritten.onnx", ".rewritten.onnx.data"):  # whose weights the bundle holds
            drafter.file(name).unlink(missing_ok=True)
    elif found.engine is not None:
        report.files["drafter"] = str(found.engine)
    report.save(request.file(".report.json"))
    return report


def _check(request: Request) -> None:
    """Raise BuilderError for a drafter that does not fit, and for a model that takes none."""
    given, directory = f"--draft {request.draft}", Path(request.draft)
    if not is_model_directory(request.model):
        raise UsageError(f"{given}: {request.model} is not a Hugging Face directory; export it with its drafter there")
    if is_of_parts(request.model, request.task) or request.task == "features":
        raise UsageError(f"{given}: {request.model} is not built as one decoder with caches; leave it out")
    if request.draft == AUTO or is_eagle(directory):
        return
    if not is_model_directory(directory):
        raise UsageError(
            f"{given}: neither an EAGLE-3 head nor a language model (a folder with config.json); expected auto, none "
            "or such a folder"
        )
    check_config(directory)
    sizes = [_vocabulary(folder) for folder in (request.model, directory)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{given}: it knows {sizes[1]} tokens and the model {sizes[0]}; give one with the same tokenizer"
        )
    check_same_tokenizer(given, request.model, directory)


def _vocabulary(directory: Path) -> object:
    config = read_config(directory)
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _drafter(request: Request, progress: Progress) -> Request:
    """The request for the drafter. A head is exported here, in the first minute, where it shows whether it fits."""
    base = request.base.with_name(f"{request.base.name}{_SUFFIX}")
    chosen = {name: _of_tokens(getattr(request, name)) for name in ("min_shapes", "opt_shapes", "max_shapes")}
    plain: dict[str, Any] = {"calib_data": None, "recipe": None, "plan": None, "surgery": None, "packed_weights": None}
    own = {
        **chosen,
        **plain,
        "is_drafter": True,
        "accuracy_budget": None,
        "accuracy_data": None,
        "kv_cache": "auto",
        "acceptance": False,
    }
    if request.head is None:
        output, bundle = (None, base) if request.bundle is not None else (base.with_name(f"{base.name}.engine"), None)
        changes: dict[str, Any] = {
            "model": Path(request.draft),
            "draft": "none",
            "adapter": None,
            "output": output,
            "bundle": bundle,
        }
        return attrs.evolve(request, **{**own, **changes})
    progress.stage(f"exporting the head of --draft {request.draft} to ONNX")
    exported = base.with_name(f"{base.name}.onnx")
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1, request.all_logits, request.head)
    with made_folder(exported.parent):
        export_head(request.model, exported, cache, request.trust_remote_code, request.adapter)
    return part_of(request, exported, base, all_logits=False, trust_remote_code=False, **own)


def _of_tokens(shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if name == IDS}
