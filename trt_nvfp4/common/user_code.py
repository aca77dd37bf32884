"""Runs a Python file that the user named."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def running(file: Path, purpose: str) -> Iterator[ModuleType]:
    """The module that `file` is, once it has run; inside the block it may import what lies beside it.

    `purpose` keeps its name apart from other modules'. Raises whatever the file raises.
    """
    spec = importlib.util.spec_from_file_location(f"{purpose}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As in an import: dataclasses and pickles look their module up.
    sys.modules[spec.name] = module
    folder = str(file.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(folder)
