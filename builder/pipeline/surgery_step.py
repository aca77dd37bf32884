"""The user's own function on the graph, before anything is looked for: `--set surgery=script.py:function`."""

from pathlib import Path

from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.user_code import running
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.load.source import checked

DEFAULT = "surgery"


def operate(model: OnnxFile, script: Path, destination: Path) -> None:
    """Writes to `destination` the gs.Graph of `model` as the user's function changes it.

    Raises BuilderError: usage where the script or its function fails, or returns no graph; unavailable without
    onnx-graphsurgeon. Raises ModelError for an invalid model.
    """
    try:
        import onnx_graphsurgeon as gs

        from trt_nvfp4 import surgeon
    except ImportError as error:
        raise UnavailableError(f"--set surgery needs onnx-graphsurgeon: {error}") from error
    checked(model)
    graph = surgeon.to_gs(model)
    file, name = split_function(script)
    where = f"--set surgery={file}:{name or DEFAULT}"
    try:
        with running(file, "surgery") as module:
            function = getattr(module, name or DEFAULT, None)
            if not callable(function):
                raise UsageError(f"{file}: has no function '{name or DEFAULT}'; name another: {file}:FUNCTION")
            returned = function(graph)
    except TrtNvfp4Error as error:
        raise UsageError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UsageError(f"{where} fails: {type(error).__name__}: {error}") from error
    if returned is not None and not isinstance(returned, gs.Graph):
        raise UsageError(
            f"{where} returns {type(returned).__name__}; expected the gs.Graph, or None where it changed the one it "
            "was given"
        )
    try:
        surgeon.save(graph if returned is None else returned, destination)
    except OSError:
        raise
    except Exception as error:  # graphsurgeon's own, of a graph that is incomplete
        raise UsageError(f"{where} leaves a graph that is not a model: {error}") from error
