"""Says before the work begins that a disk cannot hold what would be written."""

import math
import shutil

from rich.filesize import decimal

from trt_nvfp4.builder.errors import BuildFailedError
from trt_nvfp4.builder.export.checkpoints.directory import held_tensors
from trt_nvfp4.builder.export.torch_module import EXTERNAL_DATA_BYTES
from trt_nvfp4.builder.model.model_files import is_model_directory
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.calibration.checkpoint_files import CheckpointFiles
from trt_nvfp4.common.replacing import has_hard_links

_SIXTEEN_BITS = 2
_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
# Size of a weight in NVFP4, in the rewritten model and in the engine, against 16 bits.
_NVFP4 = (0.5 + 1 / 16) / _SIXTEEN_BITS


def check_disk(request: Request) -> None:
    """Raises BuildFailedError where the export of a Hugging Face directory, the rewritten model and the engine
    cannot fit beside the output, even with all weights in NVFP4."""
    if not is_model_directory(request.model) or not any(request.model.glob("*.safetensors")):
        return
    weights = _weights_bytes(request)
    sizes = {}
    if request.runs_model or weights <= EXTERNAL_DATA_BYTES:  # else it refers to the directory's files
        sizes["the exported model"] = weights
    if request.stop_after in (None, "rewrite"):
        sizes["the rewritten model"] = math.ceil(weights * _NVFP4)
        if request.stop_after is None and not request.strip and not has_hard_links(request.base.parent):
            sizes["a copy of it"] = sizes["the rewritten model"]
    if request.stop_after is None and (request.bundle is None or request.strip):  # else it holds the rewritten weights
        sizes["the engine" if request.bundle is None else "the bundle"] = math.ceil(weights * _NVFP4)
    needed, free = sum(sizes.values()), shutil.disk_usage(request.base.parent).free
    if needed > free:
        raise BuildFailedError(
            f"{request.base.parent}: at least {decimal(needed)} are needed for {' and '.join(sizes)}, and "
            f"{decimal(free)} are free; free some space, or write to another disk with -o"
        )


def _weights_bytes(request: Request) -> int:
    """Bytes of the weights in the exported model: those that are not quantized as they are, the others in 16 bits."""
    held, files = held_tensors(request.model), CheckpointFiles(request.model)
    if held is None:
        return 0
    plain = sum(math.prod(files.shape(name)) * _BYTES.get(files.dtype(name), _SIXTEEN_BITS) for name in held.plain)
    return plain + sum(math.prod(weight.shape) * _SIXTEEN_BITS for weight in held.weights.values())
