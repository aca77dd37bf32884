"""Models with caches are refused where the installed ONNX Runtime does not know their operators."""

from pathlib import Path

from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.common.onnx_runtime import unsupported_caches


def check_caches_run(model: Path, instead: str = "") -> None:
    """Raises UnavailableError where the installed ONNX Runtime cannot run models with caches. Attention is found by
    computing it there: otherwise no attention would be found, and options about it would silently do nothing.

    `instead`: another way for the user, the end of the message.
    """
    if (why := unsupported_caches()) is not None:
        raise UnavailableError(f"{model}: {why}{instead}")
