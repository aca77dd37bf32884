"""The options that `build`, `build_parts`, `plan` and `rewrite` share with the command `build-engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import KINDS

PathLike: TypeAlias = str | Path
#: Shapes of inputs by name, for example {"input_ids": (1, 128)}.
Shapes: TypeAlias = Mapping[str, Sequence[int]]
Precision: TypeAlias = Literal["auto", "nvfp4", "native-nvfp4", "fp8", "bf16"]


class BuildOptions(TypedDict, total=False):
    """Named as those of `build-engine`, whose `--help` explains them; None is as good as leaving one out."""

    precision: Precision
    activations: Literal["auto", "bf16", "fp16", "keep"]
    keep_fp32: str | None
    plan: PathLike | None
    stop_after: Literal["plan", "calibrate", "rewrite"] | None
    calib_data: PathLike | None
    recipe: str | None
    min_shapes: Shapes | None
    opt_shapes: Shapes | None
    max_shapes: Shapes | None
    include: str | None
    exclude: str | None
    kinds: Sequence[str] | None
    moe: Literal["plugin", "native"]
    attention: Literal["auto", "plugin", "native"]
    kv_cache: Literal["auto", "fp16", "bf16", "fp8"]
    surgery: PathLike | None
    dump_passes: PathLike | None
    adapter: PathLike | None
    packed_weights: PathLike | None
    require: Literal["nvfp4", "fp8"] | None
    require_fast: bool
    accuracy_budget: str | None
    accuracy_data: PathLike | None
    accuracy_samples: int
    embed_plugins: bool
    strip: bool
    weight_streaming: bool
    timing_cache: PathLike | None
    task: Literal["auto", "generate", "features"]
    cache: Literal["keep", "inplace"]
    cache_capacity: int | None
    max_batch: int | None
    all_logits: bool
    image_size: str | None
    trust_remote_code: bool


def shapes_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes.items()}


def _kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """With those that "all" stands for."""
    return (*KINDS, *(kind for kind in kinds if kind not in (*KINDS, "all"))) if "all" in kinds else tuple(kinds)


_PATHS = ("plan", "calib_data", "surgery", "dump_passes", "packed_weights", "accuracy_data", "timing_cache")
# What is made of an option's value; and the fields that are called otherwise.
_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_PATHS, Path),
    **dict.fromkeys(("min_shapes", "opt_shapes", "max_shapes"), shapes_of),
    "kinds": _kinds,
    "adapter": lambda text: Adapter.parse(str(text)),
    "accuracy_budget": Budget.parse,
}
_FIELDS = {"min_shapes": "least", "opt_shapes": "typical", "max_shapes": "most"}


def request_of(
    model: PathLike, target: str, output: PathLike | None, bundle: PathLike | None, options: Mapping[str, Any]
) -> Request:
    """What the pipeline is asked. Raises TypeError for an option that there is not, and TrtNvfp4Error for a value."""
    if unknown := options.keys() - BuildOptions.__annotations__.keys():
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}; trt_nvfp4.BuildOptions lists them")
    given = {name: _READ.get(name, lambda value: value)(value) for name, value in options.items() if value is not None}
    return Request(
        model=Path(model),
        target=find_target(target),
        output=None if output is None else Path(output),
        bundle=None if bundle is None else Path(bundle),
        **{_FIELDS.get(name, name): value for name, value in given.items()},
    )
