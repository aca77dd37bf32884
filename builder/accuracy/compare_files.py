"""Two files are compared on the user's samples, or on random ones: what `compare-engine` does."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.accuracy.compare import Comparison, Sample, Samples, compare
from trt_nvfp4.builder.accuracy.metrics import Agreement, Thresholds
from trt_nvfp4.builder.accuracy.plugins import compare_plugins
from trt_nvfp4.builder.accuracy.runners import ModelRunner
from trt_nvfp4.builder.cuda.driver import local_compute_capability
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.targets import arch_of
from trt_nvfp4.builder.tensorrt.kernels import kernels_of
from trt_nvfp4.builder.tensorrt.load import opt_shapes
from trt_nvfp4.builder.terminal.progress import Progress, Silent
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs, load_samples
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops.definition import shapes_fit

# The range of each threshold; it excludes NaN.
RANGES = {
    "min_cosine": (-1.0, 1.0),
    "min_sqnr": (-math.inf, math.inf),
    "max_abs": (0.0, math.inf),
    "max_rel": (0.0, math.inf),
    "max_kl": (0.0, math.inf),
}
RANDOM = 4  # samples
# Ends the message of a model that cannot run on random inputs.
_OF_RANDOM = (
    "; the inputs were random, of the opt shapes: give samples with --data FILE|DIR, or shapes that fit together with "
    "--shapes"
)


def compare_files(
    reference: Path,
    result: Path,
    samples: Path | Iterable[Sample] | None = None,
    *,
    shapes: Mapping[str, Shape] | None = None,
    count: int | None = None,
    seed: int | None = None,
    plan: Path | None = None,
    thresholds: Thresholds | None = None,
    judge_subgraphs: bool = False,
    with_kl: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """As `compare`, on samples: the user's, files of them, or `count` random ones of `shapes`.

    Where this machine has a GPU and no engine is compared, `Comparison.plugins` has each plugin of a rewritten result
    on it against its function body. Raises what `compare` raises.
    """
    thresholds = thresholds or Thresholds()
    check_thresholds(thresholds, judge_subgraphs)
    if samples is not None and (unused := _given({"--shapes": shapes or None, "--samples": count, "--seed": seed})):
        what = f"--data {samples}" if isinstance(samples, Path) else "samples"
        raise UsageError(
            f"{what}: {' and '.join(unused)} would make random samples instead; leave out one or the other"
        )
    progress = progress or Silent()
    sides = ModelRunner.of(reference), ModelRunner.of(result)
    model = sides[0].model or sides[1].model

    def inputs(specs: Mapping[str, InputSpec]) -> Iterable[Sample]:
        found: Iterable[Sample]
        total = 0
        if isinstance(samples, Path):
            found = load_samples(samples, specs, None if model is None else model.path.parent, trust_remote_code)
        elif samples is not None:
            found = samples
        else:
            total = count or RANDOM
            words = {} if model is None else vocabulary(model.path)
            asked = shapes or _reported_shapes(result, specs)
            found = random_samples(specs, words, total, np.random.default_rng(seed or 0), asked)
        for number, sample in enumerate(found, 1):
            yield sample
            progress.step(number, total, f"sample {number}")

    progress.stage(f"running {reference.name} and {result.name}")
    advice = _OF_RANDOM if samples is None else ""
    compared = compare(*sides, inputs, thresholds, plan, judge_subgraphs, with_kl, advice)
    if not isinstance(samples, Iterator):  # which is read only once
        compared.plugins = _on_this_gpu(compared, inputs, progress)
    return compared


def check_thresholds(thresholds: Thresholds, judge_subgraphs: bool) -> None:
    """Raise UsageError for thresholds out of range, and for --check all without a threshold."""
    limits = asdict(thresholds)
    for name, value in limits.items():
        smallest, largest = RANGES[name]
        if value is not None and not smallest <= value <= largest:
            raise UsageError(f"{_flag(name)} {value}: expected a number from {smallest:g} to {largest:g}")
    if judge_subgraphs and all(value is None for value in limits.values()):
        listed = ", ".join(map(_flag, limits))
        raise UsageError(f"--check all: there is no threshold to meet; add one of {listed}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(options: Mapping[str, object]) -> list[str]:
    return [option for option, value in options.items() if value is not None]


def _reported_shapes(result: Path, specs: Mapping[str, InputSpec]) -> dict[str, Shape]:
    """The opt shapes in the report beside an engine, rewritten model or bundle, as far as they fit the inputs."""
    # Absolute: a bundle may be '.'.
    shapes = opt_shapes(Path(str(result.absolute()).removesuffix(".rewritten.onnx")))
    return {name: shape for name, shape in shapes.items() if name in specs and shapes_fit(shape, specs[name].shape)}


def _on_this_gpu(compared: Comparison, inputs: Samples, progress: Progress) -> list[Agreement]:
    """The plugins of a rewritten result on this machine's GPU, where there is one and no engine runs on it."""
    capability = local_compute_capability()
    model = compared.result.model
    if capability is None or model is None or compared.result.kind == "onnx" or compared.reference.kind == "engine":
        return []
    progress.stage("running the plugins on this GPU")
    library = build_library(arch_of(capability), groups=kernels_of(model.proto))
    return compare_plugins(model, inputs(input_specs(model.proto)), PluginHost(library))
