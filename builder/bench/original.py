"""The ONNX model that is benchmarked, where no file holds it: of a Hugging Face directory, or of an engine that was
built from one by reference."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import attrs
import onnx_ir as ir

from trt_nvfp4.builder.bench.subject import Request, target_of
from trt_nvfp4.builder.bench.timing import Device
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.fixed_sizes import FixedSizes, ImageSize
from trt_nvfp4.builder.export.huggingface import export, export_by_reference
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, CacheOptions
from trt_nvfp4.builder.model.model_files import ENGINES, is_model_directory
from trt_nvfp4.builder.records.contents import ExportOptions
from trt_nvfp4.builder.records.json_types import misfits
from trt_nvfp4.builder.tensorrt.load import built_by
from trt_nvfp4.builder.terminal.progress import Progress
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
        request = attrs.evolve(request, target=target_of(request, device).name)
        path, weights = _exported(request, subject, None, made, progress)
        return attrs.evolve(request, subject=path, weights=weights)
    if subject.suffix not in ENGINES or request.model is not None or not subject.is_file():
        return request
    report = built_by(subject)
    directory = Path(str(report.get("model")))
    if "exported model" in report.get("files", {}) or not is_model_directory(directory):
        return request
    options: ExportOptions | None = report.get("exported")
    if options is None or misfits({"exported": options}, {"exported": ExportOptions}):
        raise UsageError(
            f"{subject}: baselines are built from the original ONNX file, which was not kept for {directory}, and "
            "the report does not say how it was exported: build again, or give --model FILE"
        )
    path, weights = _exported(request, directory, options, made, progress)
    return attrs.evolve(request, model=path, weights=weights)


def _exported(
    request: Request, directory: Path, options: ExportOptions | None, made: ExitStack, progress: Progress
) -> tuple[Path, Mapping[str, ir.TensorProtocol]]:
    progress.stage(f"exporting {directory.name} to ONNX")
    folder = made.enter_context(scratch(request.folder))
    copy_tokenizer(directory, folder / TOKENIZER)
    path, task, cache, adapter, fixed = folder / "model.onnx", "auto", CacheOptions(), None, FixedSizes()
    made.enter_context(naming(directory, path))
    if options is not None:
        task, cache = (
            options["task"],
            CacheOptions(options["cache_capacity"], options["max_batch"], options["all_logits"]),
        )
        adapter = None if options["adapter"] is None else Adapter.parse(options["adapter"])
        size = options.get("image_size")
        fixed = FixedSizes(None if size is None else ImageSize.parse(size), options.get("batch"))
    own = (request.trust_remote_code, adapter)
    if request.mode in (None, "engine") and driver.local_compute_capability() is not None:
        return export(directory, path, task, cache, *own, fixed=fixed), {}
    return path, export_by_reference(directory, path, task, cache, *own, fixed)
