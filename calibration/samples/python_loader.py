"""Samples from a function in the user's Python file, as Polygraphy's data loader scripts have it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.user_code import running

DEFAULT = "load_data"  # Polygraphy's name


def split_function(path: Path) -> tuple[Path, str]:
    """The file, and the function that is named in it: of `loader.py:function`; of any other path ""."""
    file, _, function = str(path).rpartition(":") if ".py:" in str(path) else (str(path), "", "")
    return Path(file), function


def load(file: Path, function: str) -> Iterable[tuple[str, Callable[[], Mapping[str, np.ndarray]]]]:
    """(where it is from, what gives its arrays) for each sample of `function` in `file`, called anew for each pass.

    Raises CalibrationError: the file does not run or has no such function; what it returns is not iterable; later, the
    function fails, or gives something else than mappings from input name to array.
    """
    try:
        with running(file, "calibration_loader") as module:
            found = getattr(module, function, None)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise CalibrationError(f"{file}: does not run: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise CalibrationError(f"{file}: has no function '{function}'; name another with {file}:FUNCTION")
    return _Loader(f"{file}:{function}", found)


@dataclass(frozen=True)
class _Loader:
    name: str
    function: Callable[[], Any]

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Mapping[str, np.ndarray]]]]:
        given = 0
        try:
            for sample in self.function():
                where = f"{self.name}, sample {given}"
                if not isinstance(sample, Mapping):
                    raise CalibrationError(
                        f"{where}: expected a mapping from input name to array, found {type(sample).__name__}"
                    )
                yield where, partial(arrays, where, sample)
                given += 1
        except CalibrationError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise CalibrationError(f"{self.name} fails at sample {given}: {type(error).__name__}: {error}") from error
        if not given:
            raise CalibrationError(
                f"{self.name} gives no sample; it is called once for each pass over the samples, and must return all "
                "of them each time"
            )


def arrays(where: str, sample: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The sample from `where`, whose values may be arrays, CPU tensors or nested lists, as arrays. Raises
    CalibrationError for what NumPy cannot read, such as a tensor on a GPU."""
    return {name: _array(f"{where}: {name}", value) for name, value in sample.items()}


def _array(what: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except Exception as error:  # NumPy's, and those of the value's own type
        raise CalibrationError(f"{what} is not an array of NumPy, and does not become one: {error}") from error
