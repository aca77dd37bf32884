"""A file of the user's that Python imports in place of an installed module. Imports only Python's library."""

import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path


def shadowed(error: BaseException) -> str | None:
    """The message for a failure that such a file may be the cause of; None where none was imported."""
    given = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    if os.path.abspath(sys.path[0]) == os.getcwd():  # python -m
        given.add(os.getcwd())
    installed = [folder for folder in sys.path if os.path.abspath(folder) not in given]
    for file in _imported(error):
        module = file.parent if file.stem == "__init__" else file
        is_theirs = str(module.parent) in given and module.stem != "trt_nvfp4"
        if is_theirs and PathFinder.find_spec(module.stem, installed) is not None:
            return (
                f"{file}: is imported in place of the installed module {module.stem}, which then fails "
                f"({type(error).__name__}: {error}); rename it, or take its folder out of Python's path"
            )
    return None


def _imported(error: BaseException) -> Iterator[Path]:
    """The files that were run when `error` was raised, then those of all modules."""
    cause: BaseException | None = error
    while cause is not None:
        yield from (Path(os.path.abspath(frame.filename)) for frame in traceback.extract_tb(cause.__traceback__))
        cause = cause.__cause__ or cause.__context__
    for name, module in list(sys.modules.items()):
        if "." not in name and (file := getattr(module, "__file__", None)):
            yield Path(os.path.abspath(file))
