"""The cheapest mix of precisions that meets an accuracy budget.

Each subgraph is measured alone in every precision that it allows; those that read the same weights, as calls of one
network do, are measured together and get one precision, or the weights would be stored in several. From the cheapest
mix of all, one subgraph (or such a group) at a time is then raised in precision, the one that saves most error per
second first (the greedy solution of the multiple-choice knapsack problem: Sinha, Zoltners, 1979). That gives one row of
mixes, dearer and more accurate from each to the next, whatever the budget; the first of them that meets the budget on
held-out samples, all subgraphs together, is found by bisection. So a tighter budget never costs less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from trt_nvfp4.builder.accuracy.budget import Budget, Score
from trt_nvfp4.builder.accuracy.metrics import for_json
from trt_nvfp4.builder.accuracy.runners import session, session_of, with_byte_caches
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, VERIFICATION_FAILED, BuilderError
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.report.contents import BudgetOutcome, WeighedPrecision
from trt_nvfp4.builder.roofline import LIMITS, subgraph_cost
from trt_nvfp4.builder.targets import Target
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.samples.filled_caches import Continuation, run
from trt_nvfp4.calibration.samples.samples import Sample, save_sample
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.replacing import replacing, scratch
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import AS_GIVEN, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS, lowering_on
from trt_nvfp4.graph_passes.lowerings.residual_channels import residual_counts
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.decide import allowed_decisions
from trt_nvfp4.graph_passes.planning.decoder import settle_layers
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.rewrite import lower
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph

# Of the calibration samples, every fourth is held out.
_PERIOD, _HELD_OUT = 4, 1
# Weights that were in the model's file and are no larger stay in the model.
_INLINE_BYTES = 4096
_ON_DISK = (ir.ExternalTensor, StreamedTensor)
Planned: TypeAlias = tuple[PlannedSubgraph, Subgraph]


@dataclass(frozen=True)
class Option:
    """One precision of one subgraph: the op that computes it, if any, the least time it takes, and what it does to the
    model's outputs alone, or with those that read its weights, to the `worst_output` most (see `Score`).
    `residual_channels`: None where the recipe has none, or they cannot be chosen."""

    decision: Decision
    seconds: float
    loss: float
    value: float
    op: str = ""
    worst_output: str = ""
    residual_channels: int | None = None

    @property
    def what(self) -> tuple[Decision, int | None]:
        """What tells it from the subgraph's other options."""
        return self.decision, self.residual_channels

    def __str__(self) -> str:
        more = f" with {self.residual_channels} residual channels" if self.residual_channels else ""
        return f"{self.decision}{more}"

    def as_dict(self) -> WeighedPrecision:
        """For JSON."""
        return {
            "decision": self.decision,
            "seconds": self.seconds,
            "loss": for_json(self.loss),
            "value": for_json(self.value),
            "op": self.op,
            "worst_output": self.worst_output,
            "residual_channels": self.residual_channels,
        }


@dataclass(frozen=True)
class Choice:
    """The plan that meets the budget, and the numbers behind it (`outcome`); what the user should know of them."""

    plan: Plan
    outcome: BudgetOutcome
    warnings: list[str]


@dataclass(frozen=True)
class Part:
    """Some of the samples: every fourth, or all others. Iterable any number of times."""

    samples: Iterable[Sample]
    held_out: bool

    def __iter__(self) -> Iterator[Sample]:
        return (s for i, s in enumerate(self.samples) if (i % _PERIOD == _HELD_OUT) == self.held_out)


class Trials:
    """Runs mixes of precisions in ONNX Runtime.

    On disk, in `folder`, are the original's outputs, recorded once, and the weights of each subgraph in each precision,
    quantized once, or taken from `checkpoint` where that has them; the rest of the model's weights are read where they
    are. `left_out`: outputs that no score counts.
    """

    def __init__(
        self,
        model: SourceModel,
        found: Sequence[Subgraph],
        plan: Plan,
        statistics: Statistics | None,
        checkpoint: NVFP4Checkpoint | None,
        budget: Budget,
        folder: Path,
    ) -> None:
        self._model, self._found, self._plan, self._statistics = model, found, plan, statistics
        self._budget, self._folder = budget, folder
        self.recipe, self.checkpoint = plan.recipe, checkpoint
        self.left_out: list[str] = []

    def record(self, name: str, samples: Iterable[Sample]) -> list[tuple[Sample, Path]]:
        """Each sample with the file of the original's outputs. Raises BuilderError: usage where there is none, the
        metric does not apply or all outputs are 0, model where the original's outputs are not finite."""
        runner = session(self._model.path)
        names = [output.name for output in runner.get_outputs()]
        recorded = []
        all_zero = True
        against_itself = Score(self._budget.metric)
        for index, sample in enumerate(samples):
            file = self._folder / f"{name}-{index}.npz"
            outputs = dict(zip(names, run(runner, sample), strict=True))
            against_itself.add(sample, outputs, outputs)
            if math.isnan(against_itself.loss):
                broken = next(key for key, values in outputs.items() if not np.isfinite(values).all())
                raise BuilderError(
                    MODEL_AT_FAULT,
                    f"{self._model.path}: {name} sample {index} makes the original's own output {broken} NaN or Inf, "
                    f"so that {self._budget.metric} cannot be measured against it",
                )
            all_zero = all_zero and not any(values.any() for values in outputs.values())
            recorded.append((sample, save_sample(file, outputs)))
        if not recorded:
            raise BuilderError(
                USAGE,
                "an accuracy budget needs samples to choose by and others, held out, to verify with: give "
                "--calib-data at least two samples (a folder of .npz files), or --accuracy-data",
            )
        if all_zero:
            raise BuilderError(
                USAGE,
                f"{self._model.path}: all outputs of the original are 0 in every {name} sample, which says nothing of "
                "accuracy; give samples such as the engine will see (--calib-data, --accuracy-data)",
            )
        if math.isnan(against_itself.value):
            raise BuilderError(USAGE, f"a budget of perplexity needs {name} samples of two tokens or more")
        self.left_out = [output for output in names if output in against_itself.left_out]
        return recorded

    def score(self, entries: Iterable[PlannedSubgraph], recorded: Sequence[tuple[Sample, Path]]) -> Score:
        """How the model with these entries carried out (the rest kept) does on samples."""
        plan = replace(self._plan, subgraphs=list(entries))
        lowered = lower(self._model, plan, self._statistics, self.checkpoint, self._found)
        for value in lowered.ir_model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and (isinstance(tensor, _ON_DISK) or tensor.nbytes > _INLINE_BYTES):
                value.const_value = self._on_disk(tensor, lowered.made.get(value.name or ""), lowered.scaled)
        proto = ir.to_proto(lowered.ir_model)
        runner = session_of(proto, self._model.path, Path("/"))
        names = [output.name for output in runner.get_outputs()]
        score = Score(self._budget.metric)
        for sample, file in recorded:
            with np.load(file) as stored:
                expected = {name: stored[name] for name in names}
            score.add(sample, expected, dict(zip(names, run(runner, _fed(runner, sample)), strict=True)))
        return score

    def _made_as(self, entry: PlannedSubgraph) -> str:
        """What its weights depend on beside its op: W4A16 has those of W4A4, unless the recipe rounds for inputs in
        NVFP4."""
        lowering = entry.lowering
        if not lowering.is_nvfp4_plugin:
            return entry.decision
        return f"nvfp4 {replace(lowering.recipe(entry.own(parse(self._plan.recipe))), scale_search=0)}"

    def _on_disk(
        self, tensor: ir.TensorProtocol, of: PlannedSubgraph | None, scaled: tuple[str, ...]
    ) -> ir.ExternalTensor:
        """The tensor in a file, from the root of the file system; written unless it has been."""
        if isinstance(tensor, ir.ExternalTensor):
            file, offset, length = Path(tensor.path), tensor.offset, tensor.length
        else:
            key = f"{tensor.name} {of and (self._made_as(of), of.op)} {scaled}"
            file, offset, length = self._folder / f"{sha256(key.encode()).hexdigest()}.data", 0, tensor.nbytes
            if not file.exists():
                with replacing(file) as temporary, temporary.open("wb") as stream:
                    if isinstance(tensor, StreamedTensor):
                        tensor.tofile(stream)
                    else:
                        stream.write(tensor.tobytes())
        location, shape = file.resolve().relative_to("/"), ir.Shape(tensor.shape.numpy())
        return ir.ExternalTensor(
            location, offset, length, tensor.dtype, shape=shape, name=tensor.name or "", base_dir="/"
        )


def _fed(runner: onnxruntime.InferenceSession, sample: Sample) -> Sample:
    as_bytes = {entry.name for entry in runner.get_inputs() if entry.type == "tensor(int8)"}
    if isinstance(sample, Continuation):
        return Continuation(with_byte_caches(sample.first, as_bytes), sample)
    return with_byte_caches(sample, as_bytes)


def with_all_statistics(
    plan: Plan, model: SourceModel, found: Sequence[Subgraph], target: Target, kv_cache: str
) -> Plan:
    """A plan, not to be carried out, that asks for the statistics of every precision that may be chosen."""
    entries = [
        replace(entry, decision=decision)
        for entry, subgraph in plan.check(model, found=found)
        if entry.decision not in AS_GIVEN
        for decision in _decisions(entry, subgraph, target, plan.precision, kv_cache)
    ]
    return replace(plan, subgraphs=entries)


def choose_precisions(
    model: SourceModel,
    found: Sequence[Subgraph],
    plan: Plan,
    statistics: Statistics | None,
    target: Target,
    budget: Budget,
    choosing: Iterable[Sample],
    held_out: Iterable[Sample],
    tokens: Mapping[str, int],
    require: str | None,
    kv_cache: str,
    progress: Progress,
    folder: Path,
    checkpoint: NVFP4Checkpoint | None = None,
) -> Choice:
    """Decide anew on every subgraph that `plan` replaces.

    Args:
        found: the model's subgraphs.
        choosing, held_out: samples to measure subgraphs on, and to verify the mix on.
        tokens: rows of each subgraph's input, which its cost depends on.
        require: "nvfp4" or "fp8": no lesser precision may be chosen; None: any, 16 bits included.
        kv_cache: of `planning.attention.KV_CACHES`; auto chooses FP8 caches where they meet the budget.
        folder: where temporary files, as large as the model, go. The system's own may be in memory.
        checkpoint: what has some of the weights in NVFP4 already, if anything.

    Raises BuilderError: a sample set is empty, or the metric does not apply (usage); no mix meets the budget
    (verification), and the message says how near one comes.
    """
    with scratch(folder) as own:
        trials = Trials(model, found, plan, statistics, checkpoint, budget, own)
        verifying = trials.record("held-out", held_out)
        recorded = trials.record("choosing", choosing)
        planned = plan.check(model, found=found)
        # A decoder's layer has the precision of its parts.
        apart = (*AS_GIVEN, Decision.DECODER)
        groups = sharing([(entry, subgraph) for entry, subgraph in planned if entry.decision not in apart])
        options = _measure(trials, groups, target, plan.precision, recorded, tokens, require, kv_cache, progress)
        rows = mixes_by_cost(_together(groups, options))
        mixes = [_by_subgraph(row, groups, options) for row in rows]
        progress.step(0, 0, f"verifying the mix on {len(verifying)} held-out samples")
        tried: dict[int, Score] = {}

        def meets(index: int) -> bool:
            entries = [_carried_out(entry, mixes[index]) for entry in plan.subgraphs if entry.name in mixes[index]]
            tried[index] = trials.score(entries, verifying)
            return budget.met_by(tried[index].value)

        index = first(len(mixes), meets)
    if index is None:
        sign = 1 if budget.met_by(math.inf) else -1
        # What is not a number is far from any.
        best = max(tried.values(), key=lambda score: -math.inf if math.isnan(score.value) else sign * score.value)
        limited = f" with --require {require}" if require else ""
        raise BuilderError(
            VERIFICATION_FAILED,
            f"no mix of precisions meets --accuracy-budget '{budget}'{limited}: on {len(verifying)} held-out samples "
            f"the nearest comes to {budget.metric} {budget.shown(best.value)}{_of(best.worst_output)}",
        )
    chosen = mixes[index]
    others = {entry.name: len(group) - 1 for group in groups for entry, _ in group}
    entries = [_decided(entry, chosen, options, budget, others.get(entry.name, 0)) for entry in plan.subgraphs]
    entries = settle_layers(entries, found)
    outcome: BudgetOutcome = {
        "budget": str(budget),
        "metric": budget.metric,
        "achieved": for_json(tried[index].value),
        "worst_output": tried[index].worst_output,
        "held_out_samples": len(verifying),
        "choosing_samples": len(recorded),
        "predicted_loss": for_json(sum(option.loss for option in rows[index].values())),
        "roofline_us": sum(option.seconds for option in chosen.values()) * 1e6,
        "subgraphs": {name: [option.as_dict() for option in choices] for name, choices in options.items()},
        "tried": [
            {"roofline_us": sum(o.seconds for o in mixes[i].values()) * 1e6, "achieved": for_json(tried[i].value)}
            for i in sorted(tried)
        ],
    }
    warnings = []
    if trials.left_out:
        warnings.append(f"--accuracy-budget counts floating-point outputs alone, and not {', '.join(trials.left_out)}")
    return Choice(replace(plan, subgraphs=entries), outcome, warnings)


def sharing(planned: Iterable[Planned]) -> list[list[Planned]]:
    """Entries by what they read: in one group are those that have a weight in common, directly or by others."""
    groups: list[tuple[set[object], list[Planned]]] = []
    for entry, subgraph in planned:
        weights: set[object] = {linear.weight.identity for linear in subgraph.linears}
        group: list[Planned] = []
        apart = []
        for known, members in groups:
            if known.isdisjoint(weights):
                apart.append((known, members))
            else:
                weights |= known
                group += members
        groups = [*apart, (weights, [*group, (entry, subgraph)])]
    return [group for _, group in groups]


def _measure(
    trials: Trials,
    groups: Sequence[Sequence[Planned]],
    target: Target,
    precision: str,
    recorded: Sequence[tuple[Sample, Path]],
    tokens: Mapping[str, int],
    require: str | None,
    kv_cache: str,
    progress: Progress,
) -> dict[str, list[Option]]:
    """The options of every subgraph, of the same decisions in the same order within a group."""
    recipe = parse(trials.recipe)
    wanted = [
        [
            replace(
                entry,
                decision=decision,
                op=lowering_on(decision, subgraph, target.capabilities).op(subgraph),
                residual_channels=count,
            )
            for entry, subgraph in group
        ]
        for group in groups
        for decision in _decisions(*group[0], target, precision, kv_cache)
        if (require is None or group[0][0].kind == ATTENTION or LOWERINGS[decision].meets(require))
        and all(decision in _decisions(*other, target, precision, kv_cache) for other in group[1:])
        for count in residual_counts([subgraph for _, subgraph in group], decision, recipe, trials.checkpoint)
    ]
    options: dict[str, list[Option]] = {}
    for done, entries in enumerate(wanted):
        beside = f" and {len(entries) - 1} of the same weights" if len(entries) > 1 else ""
        progress.step(done, len(wanted), f"{entries[0].name}{beside} as {entries[0].decision}")
        residual = entries[0].own(recipe).residual
        score = trials.score(entries, recorded)
        for entry in entries:
            rows, limits = tokens[entry.name], LIMITS[target.name]
            cost = subgraph_cost(entry.kind, entry.shapes, entry.decision, rows, limits, entry.dtype, residual)
            option = Option(
                entry.decision,
                cost.seconds,
                score.loss,
                score.value,
                entry.op,
                score.worst_output,
                entry.residual_channels,
            )
            options.setdefault(entry.name, []).append(option)
    return options


def _together(groups: Sequence[Sequence[Planned]], options: Mapping[str, Sequence[Option]]) -> dict[str, list[Option]]:
    """The options of each group, under the name of its first member."""
    return {
        group[0][0].name: [
            replace(alike[0], seconds=sum(option.seconds for option in alike))
            for alike in zip(*(options[entry.name] for entry, _ in group), strict=True)
        ]
        for group in groups
        if group[0][0].name in options
    }


def _by_subgraph(
    row: Mapping[str, Option], groups: Sequence[Sequence[Planned]], options: Mapping[str, Sequence[Option]]
) -> dict[str, Option]:
    """A mix by group as one by subgraph."""
    return {
        entry.name: next(option for option in options[entry.name] if option.what == row[group[0][0].name].what)
        for group in groups
        if group[0][0].name in row
        for entry, _ in group
    }


def _decisions(
    entry: PlannedSubgraph, subgraph: Subgraph, target: Target, precision: str, kv_cache: str
) -> list[Decision]:
    """What may be chosen; where the plan has TensorRT's own MoE layer, that stands for 16 bits."""
    if entry.kind == ATTENTION and kv_cache != "auto":
        return [entry.decision]
    allowed = allowed_decisions(subgraph, target.capabilities, precision)
    is_native = entry.decision == Decision.NATIVE
    return [Decision.NATIVE if is_native and decision == Decision.KEEP else decision for decision in allowed]


def mixes_by_cost(options: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """From the cheapest mix to the most accurate one, each raising one subgraph of the one before."""
    hulls = {name: efficient(choices) for name, choices in options.items()}
    raises = [
        (_slope(low, high), -index, name, high)
        for name, hull in hulls.items()
        for index, (low, high) in enumerate(itertools.pairwise(hull))
    ]
    mix = {name: hull[0] for name, hull in hulls.items()}
    mixes = [mix]
    for _, _, name, option in sorted(raises, key=lambda item: item[:3], reverse=True):
        mix = {**mix, name: option}
        mixes.append(mix)
    return mixes


def efficient(choices: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of loss over seconds, cheapest first; NaN counts as the greatest loss."""
    hull: list[Option] = []
    for option in sorted(choices, key=lambda o: (o.seconds, _rank(o.loss))):
        if hull and not option.loss < _rank(hull[-1].loss):
            continue
        while len(hull) > 1 and _slope(hull[-1], option) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(low: Option, high: Option) -> float:
    return (_rank(low.loss) - high.loss) / (high.seconds - low.seconds)


def _rank(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def first(count: int, meets: Callable[[int], bool]) -> int | None:
    """The first index below `count` that meets, by bisection; None where the last does not."""
    low, high, found = 0, count - 1, None
    while low <= high:
        middle = (low + high) // 2
        if meets(middle):
            found, high = middle, middle - 1
        else:
            low = middle + 1
    return found


def _decided(
    entry: PlannedSubgraph,
    chosen: Mapping[str, Option],
    options: Mapping[str, Sequence[Option]],
    budget: Budget,
    others: int,
) -> PlannedSubgraph:
    """`others`: how many subgraphs it was measured with."""
    if entry.name not in chosen:
        return entry
    measured = ", ".join(
        f"{o} {budget.shown(o.value)}{_of(o.worst_output)} ({o.seconds * 1e6:.3g} us)" for o in options[entry.name]
    )
    how = f"with {others} of the same weights" if others else "alone"
    reason = f"chosen for {budget}; {how}, {budget.metric} and least time: {measured}"
    return replace(_carried_out(entry, chosen), reason=reason, reason_code=ReasonCode.ACCURACY_BUDGET)


def _of(output: str) -> str:
    return f" of output {output}" if output else ""


def _carried_out(entry: PlannedSubgraph, chosen: Mapping[str, Option]) -> PlannedSubgraph:
    option = chosen[entry.name]
    return replace(entry, decision=option.decision, op=option.op, residual_channels=option.residual_channels)
