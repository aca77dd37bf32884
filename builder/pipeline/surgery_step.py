"""The user's own function on the graph, before anything is looked for: `--surgery script.py:function`."""

from __future__ import annotations

from pathlib import Path

from trt_nvfp4.builder.errors import UNAVAILABLE, USAGE, BuilderError
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.common.user_code import running
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.load.source import checked

DEFAULT = "surgery"


def operate(model: Path, script: Path, destination: Path) -> None:
    """Writes to `destination` what the user's function makes of the gs.Graph of `model`.

    Raises BuilderError: usage where the script or its function fails, or returns no graph; unavailable without
    onnx-graphsurgeon. Raises ModelError for a model that is none.
    """
    try:
        import onnx_graphsurgeon as gs

        from trt_nvfp4 import surgeon
    except ImportError as error:
        raise BuilderError(UNAVAILABLE, f"--surgery needs onnx-graphsurgeon: {error}") from error
    checked(model)
    graph = surgeon.to_gs(model)
    file, name = split_function(script)
    where = f"--surgery {file}:{name or DEFAULT}"
    try:
        with running(file, "surgery") as module:
            function = getattr(module, name or DEFAULT, None)
            if not callable(function):
                raise BuilderError(USAGE, f"{file}: has no function '{name or DEFAULT}'; name another: {file}:FUNCTION")
            returned = function(graph)
    except TrtNvfp4Error as error:
        raise BuilderError(USAGE, f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise BuilderError(USAGE, f"{where} fails: {type(error).__name__}: {error}") from error
    if returned is not None and not isinstance(returned, gs.Graph):
        raise BuilderError(
            USAGE,
            f"{where} returns {type(returned).__name__}; expected the gs.Graph, or None where it changed the one it "
            "was given",
        )
    try:
        surgeon.save(graph if returned is None else returned, destination)
    except OSError:
        raise
    except Exception as error:  # graphsurgeon's own, of a graph that is incomplete
        raise BuilderError(USAGE, f"{where} leaves a graph that is no model: {error}") from error
