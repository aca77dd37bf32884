"""The public functions: what the commands do, with Python values in and out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from trt_nvfp4.builder.accuracy import compare as comparing
from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.accuracy.compare import Comparison
from trt_nvfp4.builder.accuracy.metrics import Thresholds
from trt_nvfp4.builder.accuracy.runners import Side
from trt_nvfp4.builder.bench import bench as benching
from trt_nvfp4.builder.bench.result import Result as BenchResult
from trt_nvfp4.builder.bench.subject import Request as BenchRequest
from trt_nvfp4.builder.components import build as building_parts
from trt_nvfp4.builder.components.build import PartsReport
from trt_nvfp4.builder.components.manifest import Loop
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.user_modules import Component
from trt_nvfp4.builder.export import without_plugins as standard
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.progress import Progress, Silent
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report import inspection
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.calibration.samples.samples import InputSpec

__all__ = [
    "BenchResult",
    "BuildResult",
    "Component",
    "Generator",
    "Loop",
    "Pipeline",
    "SubgraphResult",
    "bench",
    "build",
    "build_parts",
    "compare",
    "inline_plugins",
    "inspect",
    "plan",
    "rewrite",
]

PathLike: TypeAlias = str | Path
#: Shapes of inputs by name, for example {"input_ids": (1, 128)}.
Shapes: TypeAlias = Mapping[str, Sequence[int]]
Precision: TypeAlias = Literal["auto", "nvfp4", "native-nvfp4", "fp8", "bf16"]


@dataclass(frozen=True)
class SubgraphResult:
    """What became of one planned subgraph."""

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
    """What a run wrote and found. `report` holds everything else that OUT.report.json does."""

    engine: Path | None
    bundle: Path | None
    #: By what they are: "exported model", "plan", "statistics", "rewritten model", "report", "page".
    files: Mapping[str, Path]
    subgraphs: Sequence[SubgraphResult]
    warnings: Sequence[str]
    report: Report


def build(
    model: PathLike,
    *,
    target: str,
    output: PathLike | None = None,
    bundle: PathLike | None = None,
    precision: Precision = "auto",
    activations: Literal["auto", "bf16", "fp16", "keep"] = "auto",
    keep_fp32: str | None = None,
    plan: PathLike | None = None,
    calib_data: PathLike | None = None,
    recipe: str | None = None,
    min_shapes: Shapes | None = None,
    opt_shapes: Shapes | None = None,
    max_shapes: Shapes | None = None,
    include: str | None = None,
    exclude: str | None = None,
    kinds: Sequence[str] | None = None,
    attention: Literal["auto", "plugin", "native"] = "auto",
    kv_cache: Literal["auto", "fp16", "bf16", "fp8"] = "auto",
    surgery: PathLike | None = None,
    dump_passes: PathLike | None = None,
    adapter: PathLike | None = None,
    packed_weights: PathLike | None = None,
    require: Literal["nvfp4", "fp8"] | None = None,
    require_fast: bool = False,
    accuracy_budget: str | None = None,
    accuracy_data: PathLike | None = None,
    accuracy_samples: int = 2,
    embed_plugins: bool = True,
    strip: bool = False,
    timing_cache: PathLike | None = None,
    task: Literal["auto", "generate", "features"] = "auto",
    cache: Literal["keep", "inplace"] = "keep",
    cache_capacity: int | None = None,
    max_batch: int | None = None,
    all_logits: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Builds and verifies an engine at `output`, or a folder to build it from on the device at `bundle`.

    The parameters are the options of `build-engine`, which `build-engine --help` explains.

    Args:
        model: An ONNX file, a Hugging Face directory, or a rewritten model with its `plan`.
        target: thor, b200, b300, rtx-blackwell, spark, h200, h100 or ada.
        progress: Told of stages and steps; None follows nothing.

    Raises:
        TrtNvfp4Error: The message says what to mend; `exit_code` is the command's.
        OSError: A file cannot be read or written.
    """
    return _run(
        Request(
            model=Path(model),
            target=find_target(target),
            output=_path(output),
            bundle=_path(bundle),
            precision=precision,
            activations=activations,
            keep_fp32=keep_fp32,
            plan=_path(plan),
            calib_data=_path(calib_data),
            recipe=recipe,
            least=_shapes(min_shapes),
            typical=_shapes(opt_shapes),
            most=_shapes(max_shapes),
            include=include,
            exclude=exclude,
            kinds=_kinds(kinds),
            surgery=_path(surgery),
            dump_passes=_path(dump_passes),
            adapter=None if adapter is None else Adapter.parse(str(adapter)),
            packed_weights=_path(packed_weights),
            require=require,
            require_fast=require_fast,
            accuracy_budget=Budget.parse(accuracy_budget) if accuracy_budget is not None else None,
            accuracy_data=_path(accuracy_data),
            accuracy_samples=accuracy_samples,
            embed_plugins=embed_plugins,
            strip=strip,
            timing_cache=_path(timing_cache),
            task=task,
            cache=cache,
            cache_capacity=cache_capacity,
            max_batch=max_batch,
            attention=attention,
            kv_cache=kv_cache,
            all_logits=all_logits,
            trust_remote_code=trust_remote_code,
        ),
        progress,
    )


def build_parts(
    model: PathLike,
    *,
    target: str,
    output: PathLike | None = None,
    bundle: PathLike | None = None,
    precision: Precision = "auto",
    calib_data: PathLike | None = None,
    recipe: str | None = None,
    min_shapes: Shapes | None = None,
    opt_shapes: Shapes | None = None,
    max_shapes: Shapes | None = None,
    kinds: Sequence[str] | None = None,
    cache_capacity: int | None = None,
    max_batch: int | None = None,
    image_size: str | None = None,
    strip: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PartsReport:
    """Builds every part of a model of several graphs into the folder `output`, or bundles into the folder `bundle`.

    Args:
        model: A Hugging Face directory of an encoder-decoder or vision-language model, or a Python file with the parts
            (`model.py:components`), which is run.
        calib_data: Samples of the whole model; each part is calibrated with what flows into it.
        image_size: HEIGHTxWIDTH in pixels, where the vision encoder leaves a choice.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return building_parts.run(
        Request(
            model=Path(model),
            target=find_target(target),
            output=_path(output),
            bundle=_path(bundle),
            precision=precision,
            calib_data=_path(calib_data),
            recipe=recipe,
            least=_shapes(min_shapes),
            typical=_shapes(opt_shapes),
            most=_shapes(max_shapes),
            kinds=_kinds(kinds),
            cache_capacity=cache_capacity,
            max_batch=max_batch,
            image_size=image_size,
            strip=strip,
            trust_remote_code=trust_remote_code,
        ),
        progress,
    )


def plan(
    model: PathLike,
    *,
    target: str,
    output: PathLike,
    precision: Precision = "auto",
    opt_shapes: Shapes | None = None,
    kinds: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Finds the subgraphs of `model` and plans their precision; writes `output`'s .plan.yaml, which may be edited.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return _stop_after("plan", model, target, output, precision, opt_shapes, kinds, None, None, None, progress)


def rewrite(
    model: PathLike,
    *,
    target: str,
    output: PathLike,
    precision: Precision = "auto",
    plan: PathLike | None = None,
    calib_data: PathLike | None = None,
    recipe: str | None = None,
    opt_shapes: Shapes | None = None,
    kinds: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Writes `output`'s .rewritten.onnx, in which plugin nodes stand for the planned subgraphs; builds no engine.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return _stop_after(
        "rewrite", model, target, output, precision, opt_shapes, kinds, plan, calib_data, recipe, progress
    )


def compare(
    reference: PathLike,
    result: PathLike,
    samples: Iterable[Mapping[str, np.ndarray]] | None = None,
    *,
    min_cosine: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Runs two models (ONNX, rewritten ONNX, bundle or engine) on the same inputs; returns how their outputs agree.

    Args:
        samples: Inputs by name; None draws four random ones with `seed`.
        min_cosine: `Comparison.failures` names every output whose worst sample is below.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """

    sides = Side.of(Path(reference)), Side.of(Path(result))

    def inputs(specs: Mapping[str, InputSpec]) -> Iterable[Mapping[str, np.ndarray]]:
        if samples is not None:
            return samples
        model = sides[0].model or sides[1].model
        words = {} if model is None else vocabulary(model)
        return random_samples(specs, words, 4, np.random.default_rng(seed), {})

    thresholds = Thresholds(min_cosine, None, None, None, None)
    return comparing.compare(*sides, inputs, thresholds)


def bench(
    subject: PathLike,
    *,
    target: str | None = None,
    plan: PathLike | None = None,
    model: PathLike | None = None,
    mode: Literal["engine", "plugins", "roofline"] | None = None,
    shapes: Shapes | None = None,
    calib_data: PathLike | None = None,
    rounds: int = 50,
    warm_up: int = 5,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> BenchResult:
    """Times a model with plugins against TensorRT's own NVFP4, FP8 and BF16, or predicts the least time of each.

    The parameters are the options of `bench-engine`. `result.mode` says what was done: "engine" and "plugins" measure
    on this machine's GPU, "roofline" predicts and measures nothing.

    Args:
        subject: An engine, or an ONNX file or Hugging Face directory with its `target`.
        mode: None takes what this machine can do, from engines down to the roofline.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    request = BenchRequest(
        subject=Path(subject),
        target=target,
        plan=_path(plan),
        model=_path(model),
        mode=mode,
        shapes=_shapes(shapes),
        calib_data=_path(calib_data),
        trust_remote_code=trust_remote_code,
        rounds=rounds,
        warm_up=warm_up,
    )
    return benching.bench(request, progress or Silent())


def inline_plugins(model: PathLike, output: PathLike) -> Path:
    """Writes a rewritten model to the ONNX file `output` as standard operators alone, without plugin nodes; returns its
    path. It computes the same, slower: for tools that have no plugin library.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    standard.inline_plugins(Path(model), Path(output))
    return Path(output)


def inspect(path: PathLike) -> dict[str, Any]:
    """What a model, plan, report, bundle or engine holds, as `inspect-engine --json` prints it.

    Raises:
        TrtNvfp4Error, OSError: As `build`.
    """
    return inspection.inspect(Path(path))


def _stop_after(
    stage: str,
    model: PathLike,
    target: str,
    output: PathLike,
    precision: Precision,
    opt_shapes: Shapes | None,
    kinds: Sequence[str] | None,
    plan: PathLike | None,
    calib_data: PathLike | None,
    recipe: str | None,
    progress: Progress | None,
) -> BuildResult:
    request = Request(
        model=Path(model),
        target=find_target(target),
        output=Path(output),
        precision=precision,
        plan=_path(plan),
        calib_data=_path(calib_data),
        recipe=recipe,
        typical=_shapes(opt_shapes),
        kinds=_kinds(kinds),
        stop_after=stage,
    )
    return _run(request, progress)


def _run(request: Request, progress: Progress | None) -> BuildResult:
    report = pipeline.run(request, progress)
    return BuildResult(
        engine=_path(report.engine),
        bundle=_path(report.bundle),
        files={name: Path(file) for name, file in report.files.items()},
        subgraphs=[
            SubgraphResult(**{each.name: entry[each.name] for each in fields(SubgraphResult)})
            for entry in report.subgraphs
        ],
        warnings=report.warnings,
        report=report,
    )


def _kinds(kinds: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if kinds is None else tuple(kinds)


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _shapes(shapes: Shapes | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}
