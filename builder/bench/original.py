"""The ONNX model that is benchmarked, where no file holds it: of a Hugging Face directory, or of an engine that was
built from one by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_nvfp4.builder.bench.subject import Request, target_of
from trt_nvfp4.builder.bench.timing import Device
from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.decoder_contract import TOKENIZER, CacheOptions
from trt_nvfp4.builder.export.huggingface import export, export_by_reference
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.generate.open import is_model_directory
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.report.contents import ExportOptions
from trt_nvfp4.builder.report.json_types import misfits
from trt_nvfp4.builder.tensorrt import backend
from trt_nvfp4.builder.tensorrt.load import ENGINES, built_by
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.load.faults import naming


def with_original(request: Request, made: ExitStack, progress: Progress, device: Callable[[], Device]) -> Request:
    """The request with the ONNX model of a directory, exported into a scratch folder that `made` removes; as it is
    where nothing is to be exported.

    Where no engine can be built to compare with, the weights stay in the directory's files. Raises BuilderError: usage
    for an engine whose report does not say how its directory was exported; as `export`.
    """
    subject = request.subject
    if is_model_directory(subject):
        # An export takes minutes: what it is for is asked before.
        request = replace(request, target=target_of(request, device).name)
        path, weights = _exported(request, subject, None, made, progress)
        return replace(request, subject=path, weights=weights)
    if subject.suffix not in ENGINES or request.model is not None or not subject.is_file():
        return request
    report = built_by(subject)
    directory = Path(str(report.get("model")))
    if "exported model" in report.get("files", {}) or not is_model_directory(directory):
        return request
    options: ExportOptions | None = report.get("exported")
    if options is None or misfits({"exported": options}, {"exported": ExportOptions}):
        raise BuilderError(
            USAGE,
            f"{subject}: baselines are built from the original ONNX, of {directory} no ONNX file was kept, and the "
            "report does not say how it was exported: build again, or give --model FILE",
        )
    path, weights = _exported(request, directory, options, made, progress)
    return replace(request, model=path, weights=weights)


def _exported(
    request: Request, directory: Path, options: ExportOptions | None, made: ExitStack, progress: Progress
) -> tuple[Path, Mapping[str, ir.TensorProtocol]]:
    progress.stage(f"exporting {directory.name} to ONNX")
    folder = made.enter_context(scratch(request.folder))
    copy_tokenizer(directory, folder / TOKENIZER)
    path, task, cache, adapter = folder / "model.onnx", "auto", CacheOptions(), None
    made.enter_context(naming(directory, path))
    if options is not None:
        task, cache = (
            options["task"],
            CacheOptions(options["cache_capacity"], options["max_batch"], options["all_logits"]),
        )
        adapter = None if options["adapter"] is None else Adapter.parse(options["adapter"])
    own = (request.trust_remote_code, adapter)
    if request.mode in (None, "engine") and backend.local_compute_capability() is not None:
        return export(directory, path, task, cache, *own), {}
    return path, export_by_reference(directory, path, task, cache, *own)
