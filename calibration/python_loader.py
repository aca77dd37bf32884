"""Samples from a function in the user's Python file, as Polygraphy's data loader scripts have it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CalibrationError

DEFAULT = "load_data"  # Polygraphy's name


def load(file: Path, function: str) -> Iterable[tuple[str, Callable[[], Mapping[str, np.ndarray]]]]:
    """(where it is from, what gives its arrays) for each sample of `function` in `file`, called anew for each pass.

    Raises CalibrationError: the file does not run or has no such function; what it returns is not iterable; later, the
    function fails, or gives something else than mappings from input name to array.
    """
    spec = importlib.util.spec_from_file_location(f"calibration_loader_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise CalibrationError(f"{file}: does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise CalibrationError(f"{file}: has no function '{function}'; name another with {file}:FUNCTION")
    return _Loader(f"{file}:{function}", found)


@dataclass(frozen=True)
class _Loader:
    name: str
    function: Callable[[], Any]

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Mapping[str, np.ndarray]]]]:
        index = 0
        try:
            for index, sample in enumerate(self.function()):
                where = f"{self.name}, sample {index}"
                if not isinstance(sample, Mapping):
                    raise CalibrationError(
                        f"{where}: expected a mapping from input name to array, found {type(sample).__name__}"
                    )
                yield where, partial(arrays, sample)
        except CalibrationError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise CalibrationError(f"{self.name} fails at sample {index}: {type(error).__name__}: {error}") from error


def arrays(sample: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A sample whose values may be arrays, CPU tensors or nested lists, as arrays."""
    return {name: np.asarray(value) for name, value in sample.items()}
