"""Values of options, from how a command or the Python API gives them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trt_nvfp4.builder.inputs.shape_text import Shape, Shapes, read_shapes
from trt_nvfp4.builder.options import PathLike, names
from trt_nvfp4.builder.targets import Target, find_target

if TYPE_CHECKING:
    from trt_nvfp4.builder.accuracy.budget import Budget
    from trt_nvfp4.builder.export.adapter import Adapter


def read_target(value: str | Target) -> Target:
    return find_target(value) if isinstance(value, str) else value


def read_min_shapes(value: Shapes | None) -> dict[str, Shape]:
    return read_shapes(value, "--min-shapes")


def read_opt_shapes(value: Shapes | None) -> dict[str, Shape]:
    return read_shapes(value, "--opt-shapes")


def read_max_shapes(value: Shapes | None) -> dict[str, Shape]:
    return read_shapes(value, "--max-shapes")


def read_kinds(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """With those that "all" stands for."""
    kinds = names(value)
    if kinds is None or "all" not in kinds:
        return kinds
    from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS

    return (*ALL_KINDS, *(kind for kind in kinds if kind not in (*ALL_KINDS, "all")))


def read_adapter(value: PathLike | Adapter | None) -> Adapter | None:
    if not isinstance(value, str | Path):
        return value
    from trt_nvfp4.builder.export.adapter import Adapter

    return Adapter.parse(str(value))


def read_budget(value: str | Budget | None) -> Budget | None:
    if not isinstance(value, str):
        return value
    from trt_nvfp4.builder.accuracy.budget import Budget

    return Budget.parse(value)


def read_switch(value: bool | str) -> bool:
    """Reads `yes` and `no`; others are left for the check of values."""
    return value == "yes" if value in ("yes", "no") else value  # type: ignore[return-value]
