"""The public functions: what the commands do, with Python values in and out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trt_nvfp4.builder.accuracy import compare_files as comparing
from trt_nvfp4.builder.accuracy import decoding, runners
from trt_nvfp4.builder.accuracy.compare import Comparison
from trt_nvfp4.builder.accuracy.decoding import DecodingComparison
from trt_nvfp4.builder.accuracy.metrics import Thresholds
from trt_nvfp4.builder.bench import bench as benching
from trt_nvfp4.builder.bench.result import Result as BenchResult
from trt_nvfp4.builder.bench.subject import Request as BenchRequest
from trt_nvfp4.builder.components.manifest import Loop
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.source import is_of_parts
from trt_nvfp4.builder.components.user_modules import Component
from trt_nvfp4.builder.export import without_plugins as standard
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.inputs.shape_text import Shapes, read_shapes
from trt_nvfp4.builder.options import PathLike, accepts
from trt_nvfp4.builder.options import path as as_path
from trt_nvfp4.builder.pipeline import drafter_build
from trt_nvfp4.builder.pipeline import parts_build as building_parts
from trt_nvfp4.builder.pipeline import ranks_build as ranks
from trt_nvfp4.builder.pipeline.build_options import BuildOptions
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report import inspection
from trt_nvfp4.builder.report import why as explaining
from trt_nvfp4.builder.report.inspected import Inspection
from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.report.why import Why
from trt_nvfp4.builder.terminal.progress import Progress, Silent
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar
from trt_nvfp4.options import BenchArguments, BuildArguments

__all__ = [
    "BenchResult",
    "BuildOptions",
    "BuildResult",
    "Component",
    "Generator",
    "Inspection",
    "Loop",
    "Pipeline",
    "ProgressBar",
    "SubgraphResult",
    "bench",
    "build",
    "build_parts",
    "compare",
    "compare_steps",
    "inline_plugins",
    "inspect",
    "plan",
    "rewrite",
    "run",
    "why",
]


@dataclass(frozen=True)
class SubgraphResult:
    """The outcome of one planned subgraph."""

    name: str
    #: moe, gated_mlp, mlp, linear, attention or by_hand.
    kind: str
    nodes: Sequence[str]
    #: Such as in_features.
    shapes: Mapping[str, int]
    #: As in a plan (docs/how_to/plans.md), with its reason for people and a code for programs.
    decision: str
    reason: str
    reason_code: str | None
    #: What serves it on the target, and why; "" where it stays as it is.
    kernels: str
    #: What the engine holds of it; None without an engine.
    realized: str | None


@dataclass(frozen=True)
class BuildResult:
    """Files and findings of a run. `report` holds everything else that OUT.report.json does."""

    engine: Path | None
    bundle: Path | None
    #: By what they are: "exported model", "plan", "statistics", "rewritten model", "report", "page".
    files: Mapping[str, Path]
    subgraphs: Sequence[SubgraphResult]
    warnings: Sequence[str]
    report: Report


@accepts(BuildArguments)
def build(*given: Any, **options: Any) -> BuildResult:
    """Builds and verifies an engine at `output`, or a folder to build it from on the device at `bundle`.

    Args:
        model: An ONNX file, a Hugging Face directory, or a rewritten model with its `plan`.
        target: thor, b200, b300, rtx-blackwell, spark, h200, h100 or ada.
        progress: Is called with stages and steps; None follows nothing.
        options: Those of `build-engine`, which `build-engine --help` explains; shapes may be `x:1x16` or by name.

    Raises:
        TypeError: There is no such option, or it is one of `build_parts`.
        TrtNvfp4Error: The message says what to fix; `exit_code` is the command's.
        OSError: A file cannot be read or written.
    """
    request, progress = _request(*given, **options)
    if request.parallel is not None:
        raise TypeError(f"parallel={request.parallel!r} makes several engines: call build_parts")
    if is_of_parts(request.model, request.task):
        raise TypeError(f"{request.model} is a model of several graphs, which make several engines: call build_parts")
    report = drafter_build.run(request, progress)
    return BuildResult(
        engine=as_path(report.engine),
        bundle=as_path(report.bundle),
        files={name: Path(file) for name, file in report.files.items()},
        subgraphs=[
            SubgraphResult(**{each.name: entry[each.name] for each in fields(SubgraphResult)})  # type: ignore[literal-required]
            for entry in report.subgraphs
        ],
        warnings=report.warnings,
        report=report,
    )


@accepts(BuildArguments)
def build_parts(*given: Any, **options: Any) -> PartsReport:
    """Builds every part of a model of several graphs into the folder `output`, or bundles into the folder `bundle`.

    Args:
        model: A Hugging Face directory of an encoder-decoder or vision-language model, or a Python file with the parts
            (`model.py:components`), which is run; with `parallel` a directory of a language model.
        options: As `build`'s. `calib_data` are samples of the whole model; each part is calibrated with what flows into
            it. `image_size` is HEIGHTxWIDTH in pixels, where the vision encoder leaves a choice. `parallel` tp=N splits
            the model over N GPUs, each of which gets a part.

    Raises:
        TypeError, TrtNvfp4Error, OSError: As `build`.
    """
    request, progress = _request(*given, **options)
    if request.parallel is not None:
        return ranks.run(request, request.parallel, progress)
    return building_parts.run(request, progress)


@accepts(BuildArguments)
def plan(*given: Any, **options: Any) -> BuildResult:
    """Finds the subgraphs of `model` and plans their precision; writes `output`'s .plan.yaml, which may be edited.

    Raises:
        TypeError: For another `stop_after`, or as `build`.
        TrtNvfp4Error, OSError: As `build`.
    """
    return _build_until("plan", given, options)


@accepts(BuildArguments)
def rewrite(*given: Any, **options: Any) -> BuildResult:
    """Writes `output`'s .rewritten.onnx, in which plugin nodes stand for the planned subgraphs; builds no engine.

    Raises:
        TypeError: For another `stop_after`, or as `build`.
        TrtNvfp4Error, OSError: As `build`.
    """
    return _build_until("rewrite", given, options)


def _request(*given: Any, progress: Progress | None = None, **options: Any) -> tuple[Request, Progress | None]:
    """Raises as the options' class."""
    return Request(*given, **options), progress


def _build_until(stage: Literal["plan", "rewrite"], given: tuple[Any, ...], options: dict[str, Any]) -> BuildResult:
    """Raises TypeError where the options name another stage."""
    if (named := options.get("stop_after")) not in (None, stage):
        raise TypeError(f"{stage} stops after {stage}: leave stop_after={named!r} out, or call build")
    return build(*given, **{**options, "stop_after": stage})


def compare(
    reference: PathLike,
    result: PathLike,
    samples: PathLike | Iterable[Mapping[str, np.ndarray]] | None = None,
    *,
    shapes: Shapes | None = None,
    count: int | None = None,
    seed: int | None = None,
    plan: PathLike | None = None,
    min_cosine: float | None = None,
    min_sqnr: float | None = None,
    max_abs: float | None = None,
    max_rel: float | None = None,
    max_kl: float | None = None,
    check: Literal["outputs", "all"] = "outputs",
    kl: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Runs two models (ONNX, rewritten ONNX, bundle or engine) on the same inputs; returns how their outputs agree.

    Args:
        samples: Inputs by name, or files of them as for `calib_data`; None draws `count` (4) random ones with `seed`.
        plan: Whose subgraphs are compared; None: the one beside `result`.
        min_cosine, min_sqnr, max_abs, max_rel, max_kl: `Comparison.failures` names what misses one of these.
        check: What has to meet them: only outputs, or replaced subgraphs too.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return comparing.compare_files(
        Path(reference),
        Path(result),
        Path(samples) if isinstance(samples, str | Path) else samples,
        shapes=read_shapes(shapes, "shapes"),
        count=count,
        seed=seed,
        plan=as_path(plan),
        thresholds=Thresholds(min_cosine, min_sqnr, max_abs, max_rel, max_kl),
        judge_subgraphs=check == "all",
        with_kl=kl,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


def run(model: PathLike, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model for one set of inputs, both by name.

    Args:
        model: An ONNX file, a rewritten one or a bundle, which ONNX Runtime runs on the CPU (plugins by their function
            bodies, bfloat16 in float32); or an engine, on its GPU.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return runners.run(Path(model), inputs)


def compare_steps(
    reference: PathLike,
    result: PathLike,
    steps: int,
    prompts: Sequence[str | Sequence[int]] = (),
    *,
    count: int | None = None,
    seed: int | None = None,
) -> DecodingComparison:
    """Feeds two decoders the same prompts and then `steps` of the reference's greedy tokens over their caches; returns
    KL divergence and equal tokens per step.

    Args:
        prompts: Texts or token ids; none draws `count` (3) random ones with `seed`.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    drawn = decoding.DRAWN if count is None else count
    return decoding.compare_decoding(Path(reference), Path(result), steps, prompts, drawn, seed or 0)


@accepts(BenchArguments)
def bench(*given: Any, progress: Progress | None = None, **options: Any) -> BenchResult:
    """Times a model with plugins against TensorRT's own NVFP4, FP8 and BF16, or predicts the least time of each.

    The parameters are the options of `bench-engine`. `result.mode` says what was done: "engine" and "plugins" measure
    on this machine's GPU, "roofline" predicts and measures nothing.

    Args:
        subject: An engine, or an ONNX file or Hugging Face directory with its `target`.
        output: Where the result is written as JSON; the page of the build with the same name then shows it.
        mode: None takes what this machine can do, from engines down to the roofline.
        lengths: For a language model with caches: cached tokens at which a step is timed.
        accepted: Tokens that a step with drafts adds on the mean; steps of 2 to 16 tokens are then timed, too.

    Raises:
        TypeError, TrtNvfp4Error, OSError: As `build`.
    """
    return benching.bench_to_file(BenchRequest(*given, **options), progress or Silent())


def inline_plugins(model: PathLike, output: PathLike) -> Path:
    """Writes a rewritten model to the ONNX file `output` as standard operators, without plugin nodes; returns its
    path. It computes the same, slower: for tools that have no plugin library.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    standard.inline_plugins(Path(model), Path(output))
    return Path(output)


def inspect(path: PathLike) -> Inspection:
    """The contents of a model, plan, report, bundle or engine; `kind` says which, and which other fields there are.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return inspection.inspect(Path(path))


def why(model: PathLike, name: str) -> Why:
    """Which subgraphs of the ONNX file `model` the node, tensor or subgraph `name` is in, and which matchers gave up on
    it, and why.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return explaining.explain(Path(model), name)
