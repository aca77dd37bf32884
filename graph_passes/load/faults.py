"""Tells a model that is not valid ONNX from a defect of this program.

The checks at the door (`source.checked`) name the usual faults in this program's own words. ONNX's full checker is
not used before: it rejects models that run everywhere, for a missing type of an output, for example. It runs where a
pass has failed in a way that nobody foresaw.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from trt_nvfp4.common.limited import LimitError, UnfinishedError
from trt_nvfp4.common.onnx_process import with_onnx
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.load.source import ModelError, checked


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Raise ModelError instead of an error that nobody foresaw, where the ONNX file at `path` is not valid.

    Errors of this program, of the system and of the user's Python code pass as they are.
    """
    try:
        yield
    except (TrtNvfp4Error, OSError, MemoryError):
        raise
    except Exception as error:
        if path.is_file() and (fault := _fault(path)) is not None:
            raise ModelError(f"{path}: not valid ONNX: {fault}") from error
        raise


@contextmanager
def naming(model: Path, graph: Path) -> Iterator[None]:
    """Errors name `model`, and not the graph that was made of it in a folder that is removed."""
    try:
        yield
    except TrtNvfp4Error as error:
        error.args = tuple(str(part).replace(str(graph), str(model)) for part in error.args)
        raise


def _fault(path: Path) -> str | None:
    """The model's fault; None where it has none that is known."""
    try:
        checked(path)
        with_onnx(lambda: onnx.checker.check_model(str(path), full_check=True), path.stat().st_size)
    except UnfinishedError:
        return None
    except (ModelError, LimitError) as error:
        return " ".join(str(error).split())
    except Exception:  # of the checks themselves, in the place of the error that was not foreseen
        return None
    return None
