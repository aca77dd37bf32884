"""Decides, per subgraph, what computes it on the target, and says why."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.load.activation_types import Activations
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import OP as FP8_MOE
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import fp8_moe_obstacle
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import OP as FP8_MLP
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import fp8_mlp_obstacle
from trt_nvfp4.graph_passes.lowerings.fp8_qdq import fp8_obstacle
from trt_nvfp4.graph_passes.lowerings.trt_moe import OP as NATIVE_MOE
from trt_nvfp4.graph_passes.lowerings.trt_moe import native_obstacle
from trt_nvfp4.graph_passes.lowerings.trt_nvfp4 import native_nvfp4_obstacle
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning import plan_file
from trt_nvfp4.graph_passes.planning.attention import FP8_CACHE, PLUGIN, decide_attention
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.plan_file import PlanError
from trt_nvfp4.graph_passes.planning.w4a16_or_fp8 import most_decode_tokens
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.awq_folding import find_foldings
from trt_nvfp4.graph_passes.weights.published_fp8 import is_published_in_fp8
from trt_nvfp4.plugins.ops import OPS

__all__ = [
    "DECISIONS",
    "DEFAULT_KINDS",
    "KINDS",
    "MOE_LAYERS",
    "NVFP4",
    "PRECISIONS",
    "Capabilities",
    "Plan",
    "PlanError",
    "PlannedSubgraph",
    "allowed_decisions",
    "make_plan",
    "replacing_op",
    "selection",
]

KINDS = ("moe", "gated_mlp", "mlp", "linear")
DEFAULT_KINDS = ("moe", "gated_mlp", "mlp")
PRECISIONS = ("auto", "nvfp4", "native-nvfp4", "fp8", "bf16")
MOE_LAYERS = ("plugin", "native")
DECISIONS = ("nvfp4_w4a4", "nvfp4_w4a16", "native_nvfp4", "native", "fp8", "bf16", "fp16", PLUGIN, FP8_CACHE, "keep")
# Those with NVFP4 weights.
NVFP4 = ("nvfp4_w4a4", "nvfp4_w4a16", "native_nvfp4")
# Those that compute a whole MLP in one type.
_ONE_TYPE = ("nvfp4_w4a4", "nvfp4_w4a16", "bf16", "fp16")
# What an entry's `op` may be.
_REPLACING_OPS = (*OPS, NATIVE_MOE)


@dataclass(frozen=True)
class Capabilities:
    """What a target can compute with; `target` is its name, for the reasons. `fp8_plugins`: those for FP8
    MLPs and MoE blocks have kernels of their own there, `fp8_mlp_plugin`: that for MLPs has."""

    target: str
    nvfp4_w4a4: bool = False
    nvfp4_w4a16: bool = False
    native_nvfp4: bool = False
    native: bool = False
    fp8: bool = False
    fp8_plugins: bool = False
    fp8_mlp_plugin: bool = False
    bf16: bool = True
    attention: bool = True
    attention_fp8: bool = True


@dataclass
class PlannedSubgraph:
    """One entry of a plan.

    `decision` is one of `DECISIONS`, `op` the operator that replaces the nodes ("" where none does), `linear_inputs`
    the tensors that its linears multiply, `line` the entry's line in the plan file (0 where it has none), `kernels`
    what serves it on the target and why (see `kernel_class`; "" where nobody asked yet). The rest is as in `Subgraph`.
    """

    name: str
    kind: str
    decision: str
    reason: str
    op: str
    shapes: dict[str, int]
    activation: str
    dtype: str
    input: str
    output: str
    nodes: list[str]
    linear_inputs: list[str]
    kernels: str = field(default="", compare=False)
    line: int = 0

    @property
    def fp8_plugin(self) -> str:
        """The plugin that computes it in FP8, "" where none does; another `op` is left from an edited decision."""
        if self.decision != "fp8":
            return ""
        return FP8_MOE if self.kind == "moe" else FP8_MLP if self.op == FP8_MLP else ""


@dataclass
class Plan:
    """What is to become of every subgraph found; `precision` is what was asked for, `target` for which GPU, `recipe`
    how NVFP4 weights are made (see `trt_nvfp4.calibration.recipes`), `activations` what the rest of the network
    computes in."""

    model: str
    target: str
    precision: str
    recipe: str = "max"
    subgraphs: list[PlannedSubgraph] = field(default_factory=list)
    activations: Activations = field(default_factory=Activations)
    path: Path | None = None

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, with a header that says what may be edited."""
        entries = [{key: getattr(entry, key) for key in _ENTRY_KEYS} for entry in self.subgraphs]
        for entry, planned in zip(entries, self.subgraphs, strict=True):
            entry["reason"] = f"{entry['decision']}: {entry['reason']}"
            if planned.kernels:
                entry["kernels"] = planned.kernels
        values: dict[str, Any] = {key: getattr(self, key) for key in _PLAN_KEYS}
        values["activations"] = plan_file.activations_as_yaml(self.activations)
        plan_file.write(Path(path), values | {"subgraphs": entries}, DECISIONS)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan. A reason that was given for another decision than the entry's says so.

        Raises:
            PlanError: unreadable, not YAML, or an incomplete entry or one of the wrong type (the line is named).
        """
        values, activations, entries = plan_file.read(Path(path), _PLAN_KEYS, _ENTRY_KEYS, ("kernels",))
        for entry in entries:
            decided, _, why = entry["reason"].partition(": ")
            if decided == entry["decision"]:
                entry["reason"] = why
            elif decided in DECISIONS:
                entry["reason"] = f"edited; {decided} was planned: {why}"
        planned = [PlannedSubgraph(**entry) for entry in entries]
        return cls(**values, activations=activations, subgraphs=planned, path=Path(path))

    def check(
        self,
        model: SourceModel,
        capabilities: Capabilities | None = None,
        found: Sequence[Subgraph] | None = None,
    ) -> list[tuple[PlannedSubgraph, Subgraph]]:
        """Checks the plan against the model, and against a target where its `capabilities` are given; returns each
        entry with the subgraph that it is about, in graph order. `found`: the model's subgraphs, None: find them.

        Raises:
            PlanError: an unknown precision or recipe; an entry with an unknown decision or op, for a subgraph or node
                that is not there, twice, that says of its subgraph what is not so, or with a decision that its
                subgraph or the target does not allow.
        """
        if self.precision not in PRECISIONS:
            raise PlanError(
                f"{self.path or 'plan'}: unknown precision '{self.precision}'; one of {', '.join(PRECISIONS)}"
            )
        try:
            recipes.parse(self.recipe)
        except CalibrationError as error:
            raise PlanError(f"{self.path or 'plan'}: {error}") from error
        by_name = {subgraph.name: subgraph for subgraph in (find_subgraphs(model) if found is None else found)}
        node_names = {node.name for node in model.graph}
        checked: dict[str, tuple[PlannedSubgraph, Subgraph]] = {}
        for entry in self.subgraphs:
            where = f"{self.path or 'plan'}{f', line {entry.line}' if entry.line else ''}: subgraph '{entry.name}'"
            if entry.decision not in DECISIONS:
                raise PlanError(f"{where}: unknown decision '{entry.decision}'; one of {', '.join(DECISIONS)}")
            if entry.op and entry.op not in _REPLACING_OPS:
                raise PlanError(f"{where}: unknown op '{entry.op}'; one of {', '.join(_REPLACING_OPS)}")
            if entry.name in checked:
                raise PlanError(f"{where} is planned twice")
            gone = [name for name in entry.nodes if name not in node_names]
            if gone:
                raise PlanError(f"{where}: {model.path} has no node '{gone[0]}'; plan this model anew")
            subgraph = by_name.get(entry.name)
            if subgraph is None:
                near = difflib.get_close_matches(entry.name, by_name, 1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise PlanError(f"{where}: {model.path} has no such subgraph{hint}")
            for key, actual in _facts(subgraph).items():
                if (said := getattr(entry, key)) != actual:
                    is_so, is_not = (textwrap.shorten(str(value), 200) for value in (actual, said))
                    raise PlanError(
                        f"{where}: '{key}' is {is_so} in {model.path}, and {is_not} in the plan; leave it as it was, "
                        "or plan this model anew"
                    )
            obstacle = None if entry.decision == "keep" else _obstacle(subgraph, entry.decision)
            if capabilities is not None:
                obstacle = _lack(entry.decision, capabilities) or obstacle
            if entry.fp8_plugin == FP8_MLP:
                obstacle = obstacle or fp8_mlp_obstacle(subgraph)
            if obstacle is not None:
                raise PlanError(f"{where}: it cannot be {entry.decision}: {obstacle}")
            checked[entry.name] = entry, subgraph
        return [checked[name] for name in by_name if name in checked]


# What a plan file holds: all but where it was read from.
_ENTRY_KEYS = tuple(f.name for f in fields(PlannedSubgraph) if f.name not in ("line", "kernels"))
_PLAN_KEYS = tuple(f.name for f in fields(Plan) if f.name not in ("path", "activations"))


def _facts(subgraph: Subgraph) -> dict[str, Any]:
    """What an entry says of its subgraph beside the name, which no edit can change."""
    return {
        "kind": subgraph.kind,
        "shapes": dict(subgraph.shapes),
        "activation": subgraph.activation,
        "dtype": subgraph.dtype,
        "input": subgraph.input,
        "output": subgraph.output,
        "nodes": list(subgraph.nodes),
        "linear_inputs": subgraph.linear_inputs,
    }


def make_plan(
    model: SourceModel,
    subgraphs: Sequence[Subgraph],
    capabilities: Capabilities,
    precision: str = "auto",
    kinds: Collection[str] = DEFAULT_KINDS,
    include: str | None = None,
    exclude: str | None = None,
    calibrated: bool | Collection[str] = False,
    recipe: str = "max",
    moe: str = "plugin",
    tokens: Mapping[str, int] | None = None,
    attention: str = "auto",
    kv_cache: str = "auto",
) -> Plan:
    """Decides on every subgraph.

    Args:
        precision: "auto" and "nvfp4" take NVFP4 where it serves, then FP8, then 16 bits; "fp8" and "bf16" start there;
            "native-nvfp4" takes TensorRT's own NVFP4 layers instead of plugins.
        tokens: by subgraph name, the rows of its input at the typical shapes. On a target that does not compute in FP4,
            "auto" takes FP8 first where they are more than W4A16 is fast for; without, NVFP4.
        kinds: those to replace; the rest is kept.
        include, exclude: regular expressions searched in the subgraph's name and its nodes' names.
        calibrated: activation statistics will be at hand, so that 4-bit activations get calibrated scales; or of which
            tensors.
        recipe: how NVFP4 weights are made.
        moe: "plugin", or "native": TensorRT's own MoE layer where target and block have it, else as for "plugin".
        attention, kv_cache: see `decide_attention`; `kinds` does not select attention.

    Raises:
        ValueError: an unknown precision, kind, recipe or MoE layer, or a pattern that is not a regular expression.
    """
    recipe = str(recipes.parse(recipe))
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision '{precision}'; one of {', '.join(PRECISIONS)}")
    if moe not in MOE_LAYERS:
        raise ValueError(f"unknown MoE layer '{moe}'; one of {', '.join(MOE_LAYERS)}")
    why_not, by_name = selection(kinds, include, exclude), name_selection(include, exclude)
    entries = []
    for subgraph in subgraphs:
        if subgraph.kind == ATTENTION:
            kept = by_name(subgraph)
            decision, reason = (
                ("keep", kept)
                if kept
                else decide_attention(subgraph, attention, kv_cache, has_ranges(subgraph, calibrated))
            )
            entries.append(_entry(subgraph, decision, reason, capabilities))
            continue
        kept = why_not(subgraph)
        if kept:  # these say more, for example that a router is behind which no block was recognised
            kept = subgraph.refusal or subgraph.caution or kept
        decision, reason = (
            ("keep", kept)
            if kept
            else _decide(
                subgraph,
                capabilities,
                precision,
                has_ranges(subgraph, calibrated),
                moe,
                0 if tokens is None else tokens[subgraph.name],
            )
        )
        entries.append(_entry(subgraph, decision, reason, capabilities))
    if recipes.parse(recipe).awq:
        scaled = [part for part, entry in zip(subgraphs, entries, strict=True) if entry.decision in NVFP4]
        _, obstacles = find_foldings(scaled)
        for entry in entries:
            for obstacle in obstacles.get(entry.name, ()):
                entry.reason += f"; awq leaves its {obstacle}"
    return Plan(model.path.name, capabilities.target, precision, recipe, entries, model.activations)


def _entry(subgraph: Subgraph, decision: str, reason: str, capabilities: Capabilities) -> PlannedSubgraph:
    op = replacing_op(subgraph, decision, capabilities)
    return PlannedSubgraph(name=subgraph.name, decision=decision, reason=reason, op=op, **_facts(subgraph))


def selection(
    kinds: Collection[str], include: str | None, exclude: str | None
) -> Callable[[Subgraph | PlannedSubgraph], str | None]:
    """What says why a subgraph is not among those to replace, None where it is; for the arguments see `make_plan`.

    Raises:
        ValueError: no kind, an unknown one, or a pattern that is not a regular expression.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"unknown kind '{unknown[0]}'; of {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"no kind of subgraph to replace; name some of {', '.join(KINDS)}")
    by_name = name_selection(include, exclude)

    def why_not(subgraph: Subgraph | PlannedSubgraph) -> str | None:
        if subgraph.kind not in kinds:
            return f"kind {subgraph.kind} is not among those to replace ({', '.join(kinds)})"
        return by_name(subgraph)

    return why_not


def name_selection(include: str | None, exclude: str | None) -> Callable[[Subgraph | PlannedSubgraph], str | None]:
    """The same by names alone."""
    included, excluded = _pattern("include", include), _pattern("exclude", exclude)

    def why_not(subgraph: Subgraph | PlannedSubgraph) -> str | None:
        names = (subgraph.name, *subgraph.nodes)
        if included is not None and not any(map(included.search, names)):
            return f"not matched by --include {include}"
        if excluded is not None and any(map(excluded.search, names)):
            return f"matched by --exclude {exclude}"
        return None

    return why_not


def has_ranges(subgraph: Subgraph | PlannedSubgraph, calibrated: bool | Collection[str]) -> bool:
    """Whether statistics are known of what the linears multiply, for `calibrated` as in `make_plan`."""
    return calibrated if isinstance(calibrated, bool) else set(subgraph.linear_inputs) <= set(calibrated)


def replacing_op(subgraph: Subgraph, decision: str, capabilities: Capabilities) -> str:
    """The operator that replaces the subgraph, "" where none does."""
    if decision.startswith("nvfp4") or decision in (PLUGIN, FP8_CACHE):
        return subgraph.op
    if decision == "native":
        return NATIVE_MOE
    if decision != "fp8":
        return ""
    if subgraph.kind == "moe":
        return FP8_MOE
    served = capabilities.fp8_plugins and subgraph.dtype != "float32"
    return FP8_MLP if served and fp8_mlp_obstacle(subgraph) is None else ""


def _pattern(option: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--{option} {pattern}: not a regular expression: {error}") from error


def _decide(
    subgraph: Subgraph, capabilities: Capabilities, precision: str, calibrated: bool, moe: str, tokens: int
) -> tuple[str, str]:
    """The first of the candidates that target and subgraph allow, with what spoke against the ones before."""
    if subgraph.refusal is None and subgraph.caution is not None:
        return "keep", f"{subgraph.caution}; a plan that is edited to another decision is followed"
    against: list[str] = []
    candidates = _candidates(subgraph, capabilities, precision, calibrated, tokens)
    if subgraph.kind == "moe" and moe == "native":
        candidates.insert(0, ("native", f"TensorRT's own MoE layer, experts in {subgraph.dtype}"))
    for decision, why in candidates:
        obstacle = _obstacle_on(subgraph, decision, capabilities)
        if obstacle is None:
            return decision, "; ".join([*dict.fromkeys(against), why])
        against.append(obstacle)
    raise AssertionError("keep is always possible")


def allowed_decisions(subgraph: Subgraph, capabilities: Capabilities, precision: str) -> list[str]:
    """What target and subgraph allow under `precision`, with calibration data, in order of preference.

    "keep" is among them where it means 16 bits, and where nothing else is possible.
    """
    if subgraph.kind == ATTENTION:
        return ["keep"] if subgraph.refusal is not None else [FP8_CACHE, PLUGIN]
    if subgraph.caution is not None:
        return ["keep"]
    allowed = [
        decision
        for decision, _ in _candidates(subgraph, capabilities, precision, calibrated=True)
        if _obstacle_on(subgraph, decision, capabilities) is None
    ]
    return [decision for decision in allowed if decision != "keep" or "bf16" not in allowed]


def _obstacle_on(subgraph: Subgraph, decision: str, capabilities: Capabilities) -> str | None:
    """Why the target cannot compute `subgraph` as `decision` says."""
    if decision == "keep":
        return None
    if (lack := _lack(decision, capabilities)) is not None:
        return lack
    if decision == "fp8" and subgraph.kind == "moe":
        # Elsewhere a plan may ask for it, and gets kernels that are correct and slow.
        if not capabilities.fp8_plugins:
            return f"{FP8_MOE} has no kernels of its own for {capabilities.target}"
        if subgraph.dtype == "float32":
            return f"{FP8_MOE} has no kernels of its own for float32 activations"
        if not subgraph.shapes["gated"]:
            return f"{FP8_MOE} has no kernels of its own for experts without a gate"
    return _obstacle(subgraph, decision)


def _lack(decision: str, capabilities: Capabilities) -> str | None:
    """Why the target cannot compute as `decision` says, whatever the subgraph."""
    if decision == "native" and not capabilities.native:
        return f"TensorRT has no MoE layer for {capabilities.target}"
    if decision not in ("keep", "fp16") and not getattr(capabilities, decision):
        return f"{capabilities.target} does not compute {decision}"
    return None


def _candidates(
    subgraph: Subgraph, capabilities: Capabilities, precision: str, calibrated: bool, tokens: int = 0
) -> list[tuple[str, str]]:
    # Q/DQ nodes need scales, plugins find them.
    plugin = replacing_op(subgraph, "fp8", capabilities)
    uncalibrated = "activation scales computed at run time" if plugin else "weights only"
    scales = "calibrated activation scales" if calibrated else f"{uncalibrated}, for want of calibration data"
    candidates = []
    if precision == "auto" and subgraph.moe is None and is_published_in_fp8(subgraph):
        candidates.append(("fp8", f"FP8, {scales}: the checkpoint holds its weights in FP8"))
    most = most_decode_tokens(subgraph, calibrated)
    if precision == "auto" and not capabilities.nvfp4_w4a4 and (plugin or calibrated) and tokens > most:
        why = f"faster than NVFP4 weights with more than {most} tokens, and {tokens} are typical (--opt-shapes)"
        candidates.append(("fp8", f"FP8, {scales}: {why}; --precision nvfp4 takes these"))
    if precision in ("auto", "nvfp4"):
        if calibrated:
            candidates.append(("nvfp4_w4a4", "NVFP4 weights and activations, with calibrated activation scales"))
            candidates.append(("nvfp4_w4a16", f"NVFP4 weights, {subgraph.dtype} activations"))
        else:
            why = f"NVFP4 weights, {subgraph.dtype} activations, for want of calibration data to scale 4-bit ones by"
            candidates.append(("nvfp4_w4a16", why))
            candidates.append(("nvfp4_w4a4", "NVFP4 weights and activations, activation scales computed at run time"))
    if precision == "native-nvfp4":
        candidates.append(("native_nvfp4", "TensorRT's own NVFP4 layers, with calibrated activation scales"))
    if precision != "bf16":
        candidates.append(("fp8", f"FP8, {scales}"))
    if subgraph.dtype == "float32":
        candidates.append(("bf16", "BF16 instead of float32"))
    candidates.append(("keep", f"stays {subgraph.dtype}"))
    return candidates


def _obstacle(subgraph: Subgraph, decision: str) -> str | None:
    """Why `subgraph` cannot be computed as `decision` says, whatever the target."""
    if subgraph.refusal is not None:
        return subgraph.refusal
    if (subgraph.kind == ATTENTION) != (decision in (PLUGIN, FP8_CACHE)):
        return f"that is no decision for a subgraph of kind {subgraph.kind}"
    if decision in _ONE_TYPE and subgraph.mixed_types is not None:
        return subgraph.mixed_types
    if decision in NVFP4 and (obstacle := subgraph.k_obstacle("NVFP4")) is not None:
        return obstacle
    if decision == "native_nvfp4":
        return native_nvfp4_obstacle(subgraph)
    if decision == "native":
        if subgraph.moe is None:
            return f"TensorRT's own MoE layer is none for a {subgraph.kind}"
        return native_obstacle(subgraph.moe, subgraph.dtype)
    if decision == "fp8":
        return fp8_moe_obstacle(subgraph) if subgraph.kind == "moe" else fp8_obstacle(subgraph)
    return None
