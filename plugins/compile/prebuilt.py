"""Plugin libraries that a wheel brought (see builder/cli/wheels.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

#: The package that such libraries are in; several wheels may add to it.
PACKAGE = "trt_nvfp4_kernels"


def prebuilt_library(name: str) -> Path | None:
    """The library of this name in an installed wheel, or None."""
    return next((library for library in packaged_libraries() if library.name == name), None)


def packaged_libraries() -> list[Path]:
    """All plugin libraries in installed wheels."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return sorted(library for folder in folders for library in folder.glob("*.so") if library.is_file())
