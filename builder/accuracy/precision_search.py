"""The cheapest mix of precisions that meets an accuracy budget.

Each subgraph is measured by itself in every precision that it allows. Subgraphs that read the same weights, as calls of
one network do, are measured together and get one precision, so that the weights are stored once. From the cheapest mix
on, one subgraph (or group) at a time is raised in precision, the one that saves most error per second first (the greedy
solution of the multiple-choice knapsack problem: Sinha, Zoltners, 1979). That gives one row of mixes, each dearer and
more accurate than the one before, whatever the budget. Bisection finds the first that meets the budget on held-out
samples, all subgraphs together. So a tighter budget never costs less."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import onnx_ir as ir

from trt_nvfp4.builder.accuracy.budget import Budget, Score
from trt_nvfp4.builder.accuracy.metrics import for_json
from trt_nvfp4.builder.accuracy.runners import with_byte_caches
from trt_nvfp4.builder.errors import ModelFaultError, UsageError, VerificationError
from trt_nvfp4.builder.model.onnx_session import session, session_of
from trt_nvfp4.builder.records.contents import BudgetOutcome, WeighedPrecision
from trt_nvfp4.builder.roofline.predict import LIMITS, subgraph_cost
from trt_nvfp4.builder.targets import Target
from trt_nvfp4.builder.terminal.progress import Progress
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
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph, settled
from trt_nvfp4.graph_passes.rewrite import lower
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

# Every fourth calibration sample is held out.
_PERIOD, _HELD_OUT = 4, 1
# Weights that were in the model's file and are no larger stay in the model.
_INLINE_BYTES = 4096
_ON_DISK = (ir.ExternalTensor, StreamedTensor)
Planned: TypeAlias = tuple[PlannedSubgraph, Subgraph]


@dataclass(frozen=True)
class Option:
    """One precision of one subgraph: the op that computes it, if any, the least time it takes, and its effect on
    the model's outputs, by itself or with those that read its weights, on the `worst_output` most (see `Score`).
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
        """The key among the subgraph's options."""
        return self.decision, self.residual_channels

    def __str__(self) -> str:
        more = f" with {self.residual_channels} residual channels" if self.residual_channels else ""
        return f"{self.decision}{more}"

    def as_dict(self) -> WeighedPrecision:
        """For JSON."""
        return cast(WeighedPrecision, asdict(self) | {"loss": for_json(self.loss), "value": for_json(self.value)})


@dataclass(frozen=True)
class Choice:
    """The plan that meets the budget, the numbers behind it (`outcome`), and warnings for the user."""

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


@dataclass(frozen=True)
class Draft:
    """A plan of a network whose precisions are still open, and what the choice among them depends on.

    `subgraphs`: all that were found. `tokens`: rows of each subgraph's input, which its cost depends on. `require`:
    "nvfp4" or "fp8", no lesser precision may be chosen; None: any, 16 bits included. `kv_cache`: of
    `planning.kinds.attention.KV_CACHES`; auto chooses FP8 caches where they meet the budget. `checkpoint`: holds some
    of the weights in NVFP4 already.
    """

    network: SourceModel
    subgraphs: Sequence[Subgraph]
    plan: Plan
    statistics: Statistics | None
    target: Target
    tokens: Mapping[str, int]
    require: str | None = None
    kv_cache: str = "auto"
    checkpoint: NVFP4Checkpoint | None = None

    def with_all_statistics(self) -> Plan:
        """A plan, not to be carried out, that asks for the statistics of every precision that may be chosen."""
        entries = [
            replace(entry, decision=decision)
            for entry, subgraph in self.plan.check(self.network, found=self.subgraphs)
            if entry.decision not in AS_GIVEN
            for decision in _decisions(self, entry, subgraph)
        ]
        return replace(self.plan, subgraphs=entries)


class Trials:
    """Runs mixes of precisions in ONNX Runtime.

    On disk, in `folder`, are the original's outputs, recorded once, and the weights of each subgraph in each precision,
    quantized once, or taken from the checkpoint where that has them; the rest of the model's weights are read where
    they are. `left_out`: outputs that no score counts; `perplexity`: the original's, on the samples recorded last.
    """

    def __init__(self, draft: Draft, budget: Budget, folder: Path) -> None:
        self.draft, self._budget, self._folder = draft, budget, folder
        self._model = draft.network
        self.left_out: list[str] = []
        self.perplexity: float | None = None

    def record(self, name: str, samples: Iterable[Sample]) -> list[tuple[Sample, Path]]:
        """Each sample with the file of the original's outputs. Raises BuilderError: usage without samples, where the
        metric does not apply or all outputs are 0, model where the original's outputs are not finite."""
        runner = session(self._model.file)
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
                raise ModelFaultError(
                    f"{self._model.path}: {name} sample {index} makes the original's own output {broken} NaN or Inf, "
                    f"so that {self._budget.metric} cannot be measured against it"
                )
            all_zero = all_zero and not any(values.any() for values in outputs.values())
            recorded.append((sample, save_sample(file, outputs)))
        if not recorded:
            raise UsageError(
                "an accuracy budget needs samples to choose by and others, held out, to verify with: give "
                "--calib-data at least two samples (a folder of .npz files), or --accuracy-data"
            )
        if all_zero:
            raise UsageError(
                f"{self._model.path}: all outputs of the original are 0 in every {name} sample, which says nothing of "
                "accuracy; give samples such as the engine will see (--calib-data, --accuracy-data)"
            )
        if math.isnan(against_itself.value):
            raise UsageError(f"a budget of perplexity needs {name} samples of two tokens or more")
        if self._budget.metric == "perplexity":
            self.perplexity = against_itself.value
        self.left_out = [output for output in names if output in against_itself.left_out]
        return recorded

    def score(self, entries: Iterable[PlannedSubgraph], recorded: Sequence[tuple[Sample, Path]]) -> Score:
        """The score of the model on samples, with these entries replaced and the rest kept."""
        draft, plan = self.draft, replace(self.draft.plan, subgraphs=list(entries))
        lowered = lower(draft.network, plan, draft.statistics, draft.checkpoint, draft.subgraphs)
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
        """The key of the subgraph's weights beside its op: W4A16 shares those of W4A4, unless the recipe rounds for
        inputs in NVFP4."""
        lowering = entry.lowering
        if not lowering.is_nvfp4_plugin:
            return entry.decision
        return f"nvfp4 {replace(lowering.recipe(entry.own(parse(self.draft.plan.recipe))), scale_search=0)}"

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


def choose_precisions(
    draft: Draft,
    budget: Budget,
    choosing: Iterable[Sample],
    held_out: Iterable[Sample],
    progress: Progress,
    folder: Path,
) -> Choice:
    """The choice of a precision for every subgraph that the draft's plan replaces.

    Args:
        choosing, held_out: samples to measure subgraphs on, and to verify the mix on.
        folder: where temporary files, as large as the model, go. The system's own may be in memory.

    Raises BuilderError: a sample set is empty, or the metric does not apply (usage); no mix meets the budget
    (verification), and the message says how near one comes.
    """
    plan, require = draft.plan, draft.require
    with scratch(folder) as own:
        trials = Trials(draft, budget, own)
        recorded = trials.record("choosing", choosing)
        verifying = trials.record("held-out", held_out)
        planned = plan.check(draft.network, found=draft.subgraphs)
        replaced = [(entry, subgraph) for entry, subgraph in planned if entry.decision not in AS_GIVEN]
        # A decoder layer has the precision of its parts.
        groups = sharing([pair for pair in replaced if not kind_of(pair[0]).is_whole_layer])
        options = _measure(trials, groups, recorded, progress)
        rows = mixes_by_cost(_together(groups, options))
        mixes = [_by_subgraph(row, groups, options) for row in rows]
        tried: dict[int, Score] = {}

        def meets(index: int) -> bool:
            at_most = len(mixes).bit_length()  # by bisection
            progress.step(len(tried), at_most, f"mix {len(tried) + 1} of {at_most} at most, {len(verifying)} samples")
            entries = [_carried_out(entry, mixes[index]) for entry in plan.subgraphs if entry.name in mixes[index]]
            tried[index] = trials.score(entries, verifying)
            return budget.met_by(tried[index].value)

        index = first(len(mixes), meets)
    if index is None:
        sign = 1 if budget.met_by(math.inf) else -1
        # NaN is farther away than any number.
        best = max(tried.values(), key=lambda score: -math.inf if math.isnan(score.value) else sign * score.value)
        limited = f" with --require {require}" if require else ""
        raise VerificationError(
            f"no mix of precisions meets --accuracy-budget '{budget}'{limited}: on {len(verifying)} held-out samples "
            f"the nearest comes to {budget.metric} {budget.shown(best.value)}{_of(best.worst_output)}"
            + ("" if trials.perplexity is None else f", the original to {trials.perplexity:.6g}")
        )
    chosen = mixes[index]
    others = {entry.name: len(group) - 1 for group in groups for entry, _ in group}
    entries = [_decided(entry, chosen, options, budget, others.get(entry.name, 0)) for entry in plan.subgraphs]
    entries = settled(entries, draft.subgraphs)
    outcome: BudgetOutcome = {
        "budget": str(budget),
        "metric": budget.metric,
        "achieved": for_json(tried[index].value),
        "original": trials.perplexity,
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
        warnings.append(f"--accuracy-budget counts only floating-point outputs, not {', '.join(trials.left_out)}")
    return Choice(replace(plan, subgraphs=entries), outcome, warnings)


def sharing(planned: Iterable[Planned]) -> list[list[Planned]]:
    """Entries grouped by shared weights, direct or transitive."""
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
    recorded: Sequence[tuple[Sample, Path]],
    progress: Progress,
) -> dict[str, list[Option]]:
    """The options of every subgraph, of the same decisions in the same order within a group."""
    draft, recipe = trials.draft, parse(trials.draft.plan.recipe)
    wanted = [
        [
            replace(
                entry,
                decision=decision,
                op=lowering_on(decision, subgraph, draft.target.capabilities).op(subgraph),
                residual_channels=count,
            )
            for entry, subgraph in group
        ]
        for group in groups
        for decision in _decisions(draft, *group[0])
        if (draft.require is None or not kind_of(group[0][0]).has_weights or LOWERINGS[decision].meets(draft.require))
        and all(decision in _decisions(draft, *other) for other in group[1:])
        for count in residual_counts([subgraph for _, subgraph in group], decision, recipe, draft.checkpoint)
    ]
    options: dict[str, list[Option]] = {}
    for done, entries in enumerate(wanted):
        beside = f" and {len(entries) - 1} of the same weights" if len(entries) > 1 else ""
        progress.step(
            done,
            len(wanted),
            f"precision {done + 1} of {len(wanted)}: {entries[0].name}{beside} as {entries[0].decision}",
        )
        residual = entries[0].own(recipe).residual
        score = trials.score(entries, recorded)
        for entry in entries:
            rows, limits = draft.tokens[entry.name], LIMITS[draft.target.name]
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
    """The mix by subgraph, from a mix by group."""
    return {
        entry.name: next(option for option in options[entry.name] if option.what == row[group[0][0].name].what)
        for group in groups
        if group[0][0].name in row
        for entry, _ in group
    }


def _decisions(draft: Draft, entry: PlannedSubgraph, subgraph: Subgraph) -> list[Decision]:
    """The decisions that may be chosen for a subgraph."""
    capabilities, precision = draft.target.capabilities, draft.plan.precision
    return kind_of(entry).choices(subgraph, entry.decision, capabilities, precision, draft.kv_cache)


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
    how = f"with {others} of the same weights" if others else "by itself"
    reason = f"chosen for {budget}; {how}, {budget.metric} and least time: {measured}"
    return replace(_carried_out(entry, chosen), reason=reason, reason_code=ReasonCode.ACCURACY_BUDGET)


def _of(output: str) -> str:
    return f" of output {output}" if output else ""


def _carried_out(entry: PlannedSubgraph, chosen: Mapping[str, Option]) -> PlannedSubgraph:
    option = chosen[entry.name]
    return replace(entry, decision=option.decision, op=option.op, residual_channels=option.residual_channels)
