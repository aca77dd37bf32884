"""The options of a benchmark, each written once (see `builder.options`)."""

# Without `from __future__ import annotations`: the types of fields are read.

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import attrs
from attrs import field

from trt_nvfp4.builder.inputs.shape_text import Shape, read_shapes
from trt_nvfp4.builder.options import RUNS_CODE, Options, described, numbers, path

WHAT = "What to time"
HOW = "How to time it"
WHERE = "Where to put it"

# A subject that leaves options without effect.
RANKS = "ranks"


def _lengths(value: str | Sequence[int]) -> tuple[int, ...]:
    return numbers(value, "--lengths")


@attrs.frozen(kw_only=True)
class BenchOptions(Options):
    """A model, and how to time it: the options of `bench-engine`, which its `--help` explains.

    Raises UsageError for a value that an option does not take.
    """

    GROUPS: ClassVar[tuple[str, ...]] = (WHAT, HOW, WHERE)

    subject: Path = field(
        kw_only=False,
        converter=Path,
        metadata=described(
            "OUT.engine of build-engine (the files beside it are used), an ONNX file, a Hugging Face directory, or a "
            "folder with the ranks of a model that is split over GPUs."
        ),
    )
    target: str | None = field(
        default=None,
        metadata=described(
            "GPU, as for build-engine (default: the plan's, else the one in this machine).",
            WHAT,
            metavar="NAME",
            ignored_with=(RANKS,),
        ),
    )
    plan: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Follow this plan (default: the one beside an engine, else a new one).",
            WHAT,
            metavar="FILE",
            ignored_with=(RANKS,),
        ),
    )
    model: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "The ONNX file that an engine was built from, if it is not where it was.",
            WHAT,
            metavar="FILE",
            ignored_with=(RANKS,),
        ),
    )
    trust_remote_code: bool = field(default=False, metadata=described(RUNS_CODE, WHAT))
    mode: Literal["engine", "plugins", "roofline"] | None = field(
        default=None, metadata=described("How to measure (default: the first of these that can run here).", HOW)
    )
    shapes: dict[str, Shape] = field(
        factory=dict,
        converter=read_shapes,
        metadata=described(
            "Input shapes (default: the first sample's, else the opt shapes).",
            HOW,
            metavar="x:1x16,...",
            ignored_with=(RANKS,),
        ),
    )
    calib_data: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "As for build-engine; the first sample is the input that is timed, unless --shapes asks for others.",
            HOW,
            metavar="FILE|DIR",
            ignored_with=(RANKS,),
        ),
    )
    lengths: tuple[int, ...] = field(
        default=(),
        converter=_lengths,
        metadata=described(
            "Language models: cached tokens at which a step is timed (default: an eighth, half and all of the caches' "
            "capacity).",
            HOW,
            metavar="N,N,...",
        ),
    )
    accepted: float | None = field(
        default=None,
        metadata=described(
            "Language models: tokens that a step with drafts adds on the mean (generate measures it). Steps of 2 to 16 "
            "tokens are timed, too, with the tokens per second that this makes; drafting itself is not counted.",
            HOW,
            metavar="X",
            at_least=1,
            at_most=16,
        ),
    )
    rounds: int = field(
        default=50, metadata=described("Timed runs of each engine or kernel.", HOW, metavar="N", at_least=2)
    )
    warm_up: int = field(default=5, metadata=described("Untimed runs before them.", HOW, metavar="N", at_least=0))
    output: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Write the result here as JSON (default: beside an engine).", WHERE, metavar="OUT.bench.json", short=("-o",)
        ),
    )
