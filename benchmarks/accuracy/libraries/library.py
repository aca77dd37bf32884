"""What the comparison needs of another library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.subjects import Subject


@dataclass(frozen=True)
class Library:
    """`recipes`: by what they do, our spelling and the library's own configuration. `quantize` leaves the subject's
    model computing in W4A4, `keep_activations` in W4A16 after that."""

    name: str
    version: str
    recipes: Mapping[str, tuple[str, Any]]
    quantize: Callable[[Subject, Any], object]
    keep_activations: Callable[[Subject], object]
