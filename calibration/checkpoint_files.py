"""The tensors of a model's directory under the names that most checkpoints give them.

Published checkpoints spell experts in several ways: as stacks of matrices ([E, rows, columns], or all rows below each
other), or with their number behind the projection (`experts.gate_proj.3`). Here each expert's matrix is a tensor of its
own, `experts.3.gate_proj.weight`, which is read without the others. Quark's names become ModelOpt's.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

_PROJECTIONS = "gate_proj|up_proj|down_proj|w1|w2|w3"
_SPELLINGS = (
    (re.compile(rf"(.*\.experts)\.({_PROJECTIONS})\.(\d+)\.(.+)"), r"\1.\3.\2.\4"),
    (re.compile(r"(.*\.)(weight|input)_quantizer\.scale"), r"\1\2_scale"),
    (re.compile(r"(.*\.)input_scale_2"), r"\1input_scale"),
)
_STACK = re.compile(rf"(?P<experts>.*\.experts)\.(?P<projection>{_PROJECTIONS})\.(?P<role>[^.]+)")
# The tensors that hold a stack's values, which say how it lies.
_VALUES = ("weight", "weight_packed", "qweight")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: the stored one, and the part of it that one of several experts has."""

    stored: str
    expert: int = 0
    experts: int = 1
    along_axis: bool = False  # the stack has an axis of experts


class CheckpointFiles(SafetensorsFiles):
    """As `SafetensorsFiles`, under those names.

    Raises CalibrationError as it does, and for stacks that do not hold the same for each expert.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._places = {name: _Place(name) for name in self._file_of}
        for pattern, spelling in _SPELLINGS:
            for name in list(self._places):
                renamed = pattern.sub(spelling, name)
                if renamed not in self._places:
                    self._places[renamed] = self._places.pop(name)
        self._split_stacks()

    def __getitem__(self, name: str) -> Path:
        return super().__getitem__(self._places[name].stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, in steps of one, without reading the others."""
        place = self._place(name)
        if place.experts == 1:
            return super().read(place.stored, rows)
        with self._file(place.stored) as file:
            stack = file.get_slice(place.stored)
            found: Tensor
            if place.along_axis:
                found = stack[place.expert] if rows is None else stack[place.expert, rows]
            else:
                start, stop, _ = (rows or slice(None)).indices(self.shape(name)[0])
                first = place.expert * self.shape(name)[0]
                found = stack[first + start : first + max(start, stop)]
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        place = self._place(name)
        shape = super().shape(place.stored)
        if place.experts == 1:
            return shape
        return shape[1:] if place.along_axis else (shape[0] // place.experts, *shape[1:])

    def dtype(self, name: str) -> str:
        """A tensor's type as safetensors names it, such as "BF16" or "F8_E4M3"."""
        return super().dtype(self._place(name).stored)

    def metadata(self, name: str) -> dict[str, str]:
        """The metadata of the file that holds a tensor."""
        return super().metadata(self._place(name).stored)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise CalibrationError(f"{self.path}: tensor {name} is missing")
        return self._places[name]

    def _split_stacks(self) -> None:
        """Puts a name for each expert in the place of those of stacks."""
        stacks: dict[tuple[str, str], list[str]] = {}
        for name in self._places:
            if match := _STACK.fullmatch(name):
                stacks.setdefault((match["experts"], match["projection"]), []).append(match["role"])
        for (experts, projection), roles in stacks.items():
            values = next((role for role in _VALUES if role in roles), None)
            if values is None:
                continue
            stack = f"{experts}.{projection}"
            shape = super().shape(self._places[f"{stack}.{values}"].stored)
            count = shape[0] if len(shape) == 3 else _experts(self.path)
            if not count:
                raise CalibrationError(
                    f"{self.path}: {stack}.{values} holds the rows of all experts, and config.json beside it states "
                    f"no number of experts ({', '.join(_COUNTS)}); add it, or give the original model"
                )
            for role in roles:
                stored = self._places.pop(f"{stack}.{role}").stored
                for expert, place in enumerate(self._parts(stored, count, len(shape) == 3)):
                    self._places[f"{experts}.{expert}.{projection}.{role}"] = place

    def _parts(self, stored: str, count: int, along_axis: bool) -> list[_Place]:
        """Places of the parts of a stored tensor, one for each of `count` experts."""
        shape = super().shape(stored)
        if all(size == 1 for size in shape):  # which all have in common
            return [_Place(stored)] * count
        if shape[0] != count if along_axis else shape[0] % count:
            raise CalibrationError(
                f"{self.path}: {stored} must hold the same for each of {count} experts, found {list(shape)}; download "
                "the checkpoint again, or give the original model"
            )
        return [_Place(stored, expert, count, along_axis) for expert in range(count)]


def _experts(path: Path) -> int:
    """How many experts the configuration in a folder states; 0 without one, or without a number in it."""
    config: Any = None
    with suppress(OSError, ValueError):
        config = read_config(path)
    parts = [config, *config.values()] if isinstance(config, Mapping) else []
    found = (part.get(name) for part in parts if isinstance(part, Mapping) for name in _COUNTS)
    return next((count for count in found if isinstance(count, int) and count > 0), 0)
