"""Runs a Python file that the user named."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def running(file: Path, purpose: str) -> Iterator[ModuleType]:
    """Run `file` and yield its module. Within the block, the module may import other modules of its folder.

    `purpose` is put in front of the module's name, so that no other module has that name. Raises whatever the file
    raises.
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
