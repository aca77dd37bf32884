"""Says before the work begins that a disk cannot hold what would be written."""

from __future__ import annotations

import math
import shutil

from rich.filesize import decimal

from trt_nvfp4.builder.errors import BUILD_FAILED, BuilderError
from trt_nvfp4.builder.export.checkpoints.directory import quantized_directory
from trt_nvfp4.builder.export.huggingface import is_model_directory
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

_SIXTEEN_BITS = 2
_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
# Of a weight in 16 bits: that in NVFP4, in the rewritten model and in the engine.
_NVFP4 = (0.5 + 1 / 16) / _SIXTEEN_BITS
# By the stage after which a run ends: what it writes, and how many files of quantized weights there are.
_WRITTEN = {
    "plan": ("the exported model", 0),
    "calibrate": ("the exported model", 0),
    "rewrite": ("the exported and the rewritten model", 1),
    None: ("the exported and the rewritten model and the engine", 2),
}


def check_disk(request: Request) -> None:
    """Raises BuilderError (build) where the export of a Hugging Face directory, the rewritten model and the engine
    cannot fit beside the output, even with all weights in NVFP4."""
    if not is_model_directory(request.model) or not any(request.model.glob("*.safetensors")):
        return
    plain, dequantized = _weights_bytes(request)
    files, written = _WRITTEN[request.stop_after]
    exported = plain + dequantized
    # What was dequantized lies on the disk until it is exported.
    needed = exported + max(dequantized, math.ceil(exported * written * _NVFP4))
    free = shutil.disk_usage(request.base.parent).free
    if needed > free:
        raise BuilderError(
            BUILD_FAILED,
            f"{request.base.parent}: at least {decimal(needed)} are needed for {files}, and {decimal(free)} are free; "
            "free some space, or write to another disk with -o",
        )


def _weights_bytes(request: Request) -> tuple[int, int]:
    """Of the weights in the exported model: those that are not quantized, as they are, and the others, in 16 bits."""
    quantized, files = quantized_directory(request.model), SafetensorsFiles(request.model)
    names = list(files) if quantized is None else quantized.plain
    plain = sum(math.prod(files.shape(name)) * _BYTES.get(files.dtype(name), _SIXTEEN_BITS) for name in names)
    weights = () if quantized is None else quantized.weights.values()
    return plain, sum(math.prod(weight.shape) * _SIXTEEN_BITS for weight in weights)
