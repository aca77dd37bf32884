"""Runs two models on the same inputs, sample by sample, and measures how the second agrees with the first."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.comparator import IterationResult

from trt_nvfp4.builder.accuracy.metrics import Agreement, Thresholds, in_float64, is_discrete
from trt_nvfp4.builder.accuracy.runners import ModelRunner, infer, quiet, with_byte_caches
from trt_nvfp4.builder.errors import UsageError, VerificationError
from trt_nvfp4.calibration.samples.samples import InputSpec, save_sample
from trt_nvfp4.common.cache_names import is_past
from trt_nvfp4.plugins.ops.definition import shapes_fit

Sample = Mapping[str, np.ndarray]
# Makes the samples from the inputs that the reference takes.
Samples = Callable[[Mapping[str, InputSpec]], Iterable[Sample]]


@dataclass
class Comparison:
    """The outcome: one agreement per output and replaced subgraph, and the thresholds that were missed.

    A tensor that is both has two: as the output by its own name, as the subgraph by the subgraph's.
    `worst` holds, for every output, the sample with the lowest cosine, by the sample's number; `warnings` says where
    the samples are such that agreement on them proves nothing; `plugins` is of a rewritten result's on this GPU.
    """

    reference: ModelRunner
    result: ModelRunner
    agreements: list[Agreement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    samples: int = 0
    worst: dict[int, Sample] = field(default_factory=dict)
    plugins: list[Agreement] = field(default_factory=list)

    def take(self, number: int, sample: Sample) -> None:
        """Count a sample that `agreements` account for, and keep it while it is an output's worst."""
        self.samples += 1
        worst = {row.worst_sample for row in self.agreements if row.kind == "output"}
        self.worst = {n: kept for n, kept in (*self.worst.items(), (number, sample)) if n in worst}

    def as_dict(self) -> dict[str, Any]:
        plugins = {"plugins": [row.as_dict() for row in self.plugins]} if self.plugins else {}
        return {
            "reference": {"path": str(self.reference.path), "kind": self.reference.kind},
            "result": {"path": str(self.result.path), "kind": self.result.kind},
            "samples": self.samples,
            "tensors": [row.as_dict() for row in self.agreements],
            "failures": self.failures,
            "warnings": self.warnings,
            **plugins,
        }

    def save_worst(self, folder: Path) -> list[Path]:
        """Write the worst samples as .npz files that `--data` reads back; returns them."""
        folder.mkdir(parents=True, exist_ok=True)
        return [
            save_sample(folder / f"sample-{number:05}.npz", sample) for number, sample in sorted(self.worst.items())
        ]


def compare(
    reference: ModelRunner,
    result: ModelRunner,
    samples: Samples,
    thresholds: Thresholds | None = None,
    plan: Path | None = None,
    judge_subgraphs: bool = False,
    with_kl: bool = False,
    advice: str = "",
) -> Comparison:
    """Agreement of `result` with `reference` in every output, and in every replaced subgraph that both show.

    The inner tensors of an engine cannot be seen, so a comparison with one covers only outputs. `thresholds` apply
    to outputs, and with `judge_subgraphs` to subgraphs; to integers and booleans only where all outputs are such.
    One sample is in memory at a time, and the worst ones. `advice` ends the message where a model fails on one.

    Raises BuilderError: the inputs or outputs differ or are not numbers, no sample, a plan of other models, a threshold
    that applies to nothing, a model that cannot run here, or (verification) outputs that differ in size.
    """
    planned = result.subgraphs(plan)
    names = {**reference.subgraphs(), **planned}
    shared = reference.tensors() & result.tensors()
    if plan is not None and not planned.keys() & shared:
        raise UsageError(
            f"--plan {plan}: none of its replaced subgraphs can be seen in both {reference.path} and {result.path}; "
            "leave it out, or give the plan that RESULT was rewritten by"
        )
    inner = {tensor: name for tensor, name in names.items() if tensor in shared}
    if judge_subgraphs and not inner:
        raise UsageError(
            f"--check all: no replaced subgraph can be seen in both {reference.path} and {result.path}; leave it out, "
            "and only the outputs are judged"
        )
    outcome = Comparison(reference, result)
    thresholds = thresholds or Thresholds()
    with_kl = with_kl or thresholds.max_kl is not None
    rows: list[tuple[str, Agreement]] = []
    judged: list[Agreement] = []
    any_input = False
    # Values that are not finite are reported below.
    unwarned = np.errstate(invalid="ignore", over="ignore")
    with quiet(), unwarned, reference.runner(inner) as first, result.runner(inner) as second:
        specs, byte_caches = _check_same_inputs(reference, first, result, second)
        for number, sample in enumerate(samples(specs)):
            expected = infer(reference, first, sample, advice)
            actual = infer(result, second, with_byte_caches(sample, byte_caches), advice)
            if number == 0:
                rows = _rows(reference, expected, result, actual, inner, with_kl)
                outcome.agreements = [row for _, row in rows]
                judged = _judged(outcome.agreements, judge_subgraphs)
            for name, row in rows:
                x, y = _numbers(reference, name, expected[name]), _numbers(result, name, actual[name])
                _check_same_size(outcome, f"{row.kind} {row.name}, sample {number}", x, y)
                row.add(x, y)
                asked = thresholds if row in judged else Thresholds()
                outcome.failures += [
                    f"{row.kind} {row.name}, sample {number}: {missed}" for missed in _missed(asked, x, y)
                ]
            outcome.take(number, sample)
            any_input = any_input or any(np.any(value) for value in sample.values())
    if not outcome.samples:
        raise UsageError("no sample to compare on: --data is empty")
    _check_judged(thresholds, judged)
    if not any_input:
        outcome.warnings.append("every input is 0 in every sample: this agreement says nothing about other inputs")
    outcome.warnings += _warnings(outcome.agreements, with_kl)
    left_out = [row for row in outcome.agreements if row.kind == "output" and row not in judged]
    if left_out and thresholds != Thresholds(max_kl=thresholds.max_kl):  # of KL it is said already
        shares = ", ".join(f"{row.name} ({row.equal:.2%} of its values are equal)" for row in left_out)
        outcome.warnings.append(f"thresholds apply only to floating-point outputs, not to {shares}")
    return outcome


def _rows(
    reference: ModelRunner,
    expected: IterationResult,
    result: ModelRunner,
    actual: IterationResult,
    inner: Mapping[str, str],
    with_kl: bool,
) -> list[tuple[str, Agreement]]:
    """One row per output, and per tensor of `inner` for the subgraph named there, with the result tensor's name."""
    outputs = _outputs(result, actual)
    _check_same_names("outputs", reference, _outputs(reference, expected), result, outputs)
    rows = [
        (name, Agreement(name, "output", with_kl, is_discrete(_numbers(reference, name, expected[name]))))
        for name in actual
        if name in outputs and not _is_byte_cache(expected[name], actual[name])
    ]
    return rows + [(tensor, Agreement(name, "subgraph", with_kl)) for tensor, name in inner.items()]


def _is_byte_cache(expected: Any, actual: Any) -> bool:
    """True for FP8 caches, bytes, where the original has numbers: they cannot be compared."""
    types = [np.asarray(value).dtype for value in (expected, actual)]
    return types[0].kind not in "iub" and types[1] == np.int8


def _judged(agreements: list[Agreement], judge_subgraphs: bool) -> list[Agreement]:
    """The agreements that thresholds apply to: integers only where there is nothing else to judge."""
    outputs = [row for row in agreements if row.kind == "output"]
    subgraphs = [row for row in agreements if row.kind == "subgraph" and judge_subgraphs]
    return ([row for row in outputs if not row.discrete] or outputs) + subgraphs


def _check_judged(thresholds: Thresholds, judged: Sequence[Agreement]) -> None:
    """Raises UsageError for thresholds that no sample was held to: they would pass whatever the result is."""
    names = ", ".join(row.name for row in judged)
    if thresholds != Thresholds() and all(row.is_empty for row in judged):
        raise UsageError(f"no threshold applies: {names} hold no value in any sample; give other --data")
    if thresholds.max_kl is not None and all(row.kl is None for row in judged):
        raise UsageError(
            f"--max-kl {thresholds.max_kl}: none of {names} can be logits, which are floating-point numbers whose last "
            "axis has two entries or more; leave it out"
        )


def _warnings(agreements: list[Agreement], with_kl: bool) -> Iterator[str]:
    """Cases in which the numbers in the table say nothing."""
    if zero := [row.name for row in agreements if row.reference_is_zero]:
        yield f"the reference is 0 in every sample, cosine and SQNR say nothing: {', '.join(zero)}"
    if broken := [row.name for row in agreements if not math.isfinite(row.max_abs)]:
        yield f"NaN or infinite in one of the two, or in both: {', '.join(broken)}"
    if with_kl and (without := [row.name for row in agreements if row.kl is None]):
        yield f"KL says nothing of integers, nor where the last axis has fewer than two entries: {', '.join(without)}"


def _numbers(side: ModelRunner, name: str, values: Any) -> np.ndarray:
    """One result as an array. Raises UsageError for strings, sequences and the like."""
    if isinstance(values, list) or np.asarray(values).dtype.kind in "OSUc":
        raise UsageError(
            f"{side.path}: output {name} is not a tensor of real numbers, and nothing else can be compared; take it "
            "from the outputs of both models"
        )
    return np.asarray(values)


def _check_same_size(outcome: Comparison, what: str, expected: np.ndarray, actual: np.ndarray) -> None:
    if expected.ndim == actual.ndim and expected.shape != actual.shape:
        raise VerificationError(
            f"{what}: shape {list(expected.shape)} in {outcome.reference.path}, {list(actual.shape)} in "
            f"{outcome.result.path}; where the number of entries depends on values, as for detections, "
            "compare an earlier tensor"
        )


def _missed(thresholds: Thresholds, expected: np.ndarray, actual: np.ndarray) -> list[str]:
    """The thresholds that are missed. Equal tensors meet all, even where a metric is not exact or undefined."""
    functions = list(thresholds.functions(expected))
    if not functions or (np.array_equal(expected, actual) and np.isfinite(expected).all()):
        return []
    reference, result = (IterationResult({"tensor": x}, runner_name="") for x in in_float64(expected, actual))
    missed = [asked for asked, function in functions if not function(result, reference)["tensor"]]
    if not missed:
        return []
    alone = Agreement("", "", with_kl=True)  # of this sample
    alone.add(expected, actual)
    reached = alone.reached()
    return [f"{asked} is not met: {reached[asked.split(' >=')[0].split(' <=')[0]]}" for asked in missed]


def _outputs(side: ModelRunner, results: IterationResult) -> set[str]:
    """The model's own outputs among the results, which hold inner tensors of an ONNX model too."""
    return set(results) if side.model is None else side.outputs()


def _check_same_inputs(
    a: ModelRunner, first: BaseRunner, b: ModelRunner, second: BaseRunner
) -> tuple[dict[str, InputSpec], set[str]]:
    """The inputs of the first, once it is known that the second takes the same, and which of them the second takes as
    bytes of FP8 caches."""
    ours, theirs = a.input_specs(first), b.input_specs(second)
    _check_same_names("inputs", a, ours.keys(), b, theirs.keys())
    byte_caches: set[str] = set()
    for name, spec in ours.items():
        other = theirs[name]
        if other.dtype == np.int8 and spec.dtype.kind not in "iub" and is_past(name):
            byte_caches.add(name)
            continue
        if not shapes_fit(spec.shape, other.shape) or spec.dtype != other.dtype:
            raise UsageError(
                f"not the same model: input {name} is {spec.dtype} {list(spec.shape)} in {a.path}, "
                f"{other.dtype} {list(other.shape)} in {b.path}"
            )
    return ours, byte_caches


def _check_same_names(what: str, a: ModelRunner, ours: Set[str], b: ModelRunner, theirs: Set[str]) -> None:
    if ours != theirs:
        raise UsageError(
            f"not the same model: the {what} of {a.path} are {', '.join(sorted(ours))}, "
            f"those of {b.path} {', '.join(sorted(theirs))}"
        )
