"""Devices that run the parts of a model: tensors stay on them, and flow from part to part as handles.

Imports NumPy only: bundles carry this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from trt_nvfp4.builder.components.manifest import Port

#: A tensor on a device; only the device knows its type.
Handle: TypeAlias = Any
# bfloat16 is computed in float32 on a CPU; see `widen`.
_NUMPY = {"bfloat16": np.dtype(np.float32)}


class Device(Protocol):
    """Runs parts by name. `name` says where, for messages."""

    name: str

    def put(self, name: str, array: np.ndarray, port: Port) -> Handle:
        """The array on the device, of the port's type. What was put there by the same name before is lost."""

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> Handle:
        """A tensor of zeros of the port's type, such as an empty cache; as `put`."""

    def run(self, part: str, feeds: Mapping[str, Handle], in_place: Mapping[str, str]) -> dict[str, Handle]:
        """The part's outputs, which last until it runs again. `in_place`: outputs that take the memory of an input."""

    def longest(self, part: str, name: str, axis: int) -> int | None:
        """The largest dimension that the part was built for; None where there is no limit."""

    def copy_row(self, source: Handle, row: int, target: Handle, to: int, axis: int) -> None:
        """The row `to` of `target` along `axis` becomes a copy of `row` of `source`, which may be the same tensor."""

    def clear_row(self, handle: Handle, row: int, axis: int) -> None:
        """Zero one row along `axis`."""

    def get(self, handle: Handle) -> np.ndarray:
        """The tensor in host memory, in float32 where NumPy lacks its type."""

    def close(self) -> None:
        """Free what it holds."""


def numpy_type(port: Port) -> np.dtype[Any]:
    return _NUMPY.get(port.dtype) or np.dtype(port.dtype)
