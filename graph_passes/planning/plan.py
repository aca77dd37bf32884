"""A plan: what is to become of every subgraph of a model, and why."""

import difflib
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.load.activation_types import Activations
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import RENAMED, Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS, REPLACING_OPS
from trt_nvfp4.graph_passes.lowerings.residual_channels import RESIDUAL_DECISIONS, residual_unsupported
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning import plan_file
from trt_nvfp4.graph_passes.planning.kinds.registry import KINDS, kind_of
from trt_nvfp4.graph_passes.planning.plan_file import PlanError
from trt_nvfp4.graph_passes.planning.planned import ENTRY_KEYS, OPTIONAL_KEYS, PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

__all__ = ["PRECISIONS", "Plan", "PlanError", "PlannedSubgraph", "facts", "settled"]

PRECISIONS = ("auto", "nvfp4", "native-nvfp4", "fp8", "bf16")


@dataclass
class Plan:
    """The decision on every subgraph of a model. `precision` is the requested one, `target` the GPU's name, `recipe`
    how NVFP4 weights are made (see `trt_nvfp4.calibration.recipes`), `activations` the type of the
    rest of the network."""

    model: str
    target: str
    precision: str
    recipe: str = "max"
    subgraphs: list[PlannedSubgraph] = field(default_factory=list)
    activations: Activations = field(default_factory=Activations)
    path: Path | None = None

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, with a header that says what may be edited."""
        entries = [entry.as_yaml() for entry in self.subgraphs]
        values: dict[str, Any] = {key: getattr(self, key) for key in _PLAN_KEYS}
        values["activations"] = plan_file.activations_as_yaml(self.activations)
        descriptions = {str(decision): lowering.description for decision, lowering in LOWERINGS.items()}
        plan_file.write(Path(path), values | {"subgraphs": entries}, descriptions)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan. A reason that was given for another decision than the entry's says so.

        Raises:
            PlanError: unreadable, not YAML, or an entry that is incomplete, of the wrong type or with an unknown
                decision (the line is named).
        """
        values, activations, entries = plan_file.read(Path(path), _PLAN_KEYS, ENTRY_KEYS, OPTIONAL_KEYS)
        planned = [_entry(Path(path), entry) for entry in entries]
        return cls(**values, activations=activations, subgraphs=planned, path=Path(path))

    def check_by_itself(self, capabilities: Capabilities | None = None) -> None:
        """Checks what can be known without the model, against a target where its `capabilities` are given.

        Raises:
            PlanError: an unknown precision or recipe; an entry with an unknown op, one that is there twice, or one with
                a decision that the target does not allow.
        """
        if self.precision not in PRECISIONS:
            raise PlanError(
                f"{self.path or 'plan'}: unknown precision '{self.precision}'; one of {', '.join(PRECISIONS)}"
            )
        try:
            recipes.parse(self.recipe)
        except CalibrationError as error:
            raise PlanError(f"{self.path or 'plan'}: {error}") from error
        seen: set[str] = set()
        for entry in self.subgraphs:
            where = self._place(entry)
            if entry.op and entry.op not in REPLACING_OPS:
                raise PlanError(f"{where}: unknown op '{entry.op}'; one of {', '.join(REPLACING_OPS)}")
            if entry.name in seen:
                raise PlanError(f"{where} is planned twice")
            seen.add(entry.name)
            unsupported = None if capabilities is None else entry.lowering.unsupported_by(capabilities)
            if unsupported is not None:
                raise PlanError(f"{where}: it cannot be {entry.decision}: {unsupported.text}")

    def _place(self, entry: PlannedSubgraph) -> str:
        """How messages name an entry."""
        return f"{self.path or 'plan'}{f', line {entry.line}' if entry.line else ''}: subgraph '{entry.name}'"

    def check(
        self,
        model: SourceModel,
        capabilities: Capabilities | None = None,
        found: Sequence[Subgraph] | None = None,
    ) -> list[tuple[PlannedSubgraph, Subgraph]]:
        """Checks the plan against the model, and against a target where its `capabilities` are given; returns each
        entry with the subgraph that it is about, in graph order. `found`: the model's subgraphs, None: find them.

        Raises:
            PlanError: as `check_by_itself`; an entry for a subgraph or node that is not there, that says of its
                subgraph what is not so, or with a decision that its subgraph does not allow.
        """
        self.check_by_itself(capabilities)
        by_name = {subgraph.name: subgraph for subgraph in (find_subgraphs(model) if found is None else found)}
        node_names = {node.name for node in model.graph}
        checked: dict[str, tuple[PlannedSubgraph, Subgraph]] = {}
        for entry in self.subgraphs:
            where = self._place(entry)
            gone = [name for name in entry.nodes if name not in node_names]
            if gone:
                raise PlanError(f"{where}: {model.path} has no node '{gone[0]}'; plan this model anew")
            subgraph = by_name.get(entry.name)
            if subgraph is None:
                near = difflib.get_close_matches(entry.name, by_name, 1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise PlanError(f"{where}: {model.path} has no such subgraph{hint}")
            for key, actual in facts(subgraph).items():
                if (said := getattr(entry, key)) != actual:
                    is_so, is_not = (textwrap.shorten(str(value), 200) for value in (actual, said))
                    raise PlanError(
                        f"{where}: '{key}' is {is_so} in {model.path}, and {is_not} in the plan; leave it as it was, "
                        "or plan this model anew"
                    )
            unsupported = entry.lowering.unsupported(subgraph)
            if unsupported is not None:
                raise PlanError(f"{where}: it cannot be {entry.decision}: {unsupported.text}")
            self._check_residual_channels(where, entry, subgraph)
            if (why := kind_of(entry).conflict(entry, subgraph, self.subgraphs)) is not None:
                raise PlanError(f"{where}: it cannot be {entry.decision}: {why}; edit one, or plan {Decision.KEEP}")
            checked[entry.name] = entry, subgraph
        return [checked[name] for name in by_name if name in checked]

    def _check_residual_channels(self, where: str, entry: PlannedSubgraph, subgraph: Subgraph) -> None:
        """Raises PlanError where an entry asks for residual channels that it cannot have."""
        count = entry.residual_channels
        if count is None:
            return
        known = (0, *recipes.RESIDUALS.values())
        if count not in known:
            raise PlanError(f"{where}: 'residual_channels' is {count}; one of {', '.join(map(str, known))}")
        if not count:
            return
        unsupported: str | None = f"it is {entry.decision}"
        if entry.decision in RESIDUAL_DECISIONS:
            is_mixed = entry.decision == Decision.NVFP4_MIXED
            unsupported = residual_unsupported(subgraph, entry.own(recipes.parse(self.recipe)), is_mixed=is_mixed)
        if unsupported is not None:
            raise PlanError(f"{where}: it cannot have residual channels: {unsupported}; leave out 'residual_channels'")


_PLAN_KEYS = tuple(f.name for f in fields(Plan) if f.name not in ("path", "activations"))


def _entry(path: Path, read: dict[str, Any]) -> PlannedSubgraph:
    """An entry of a plan file. A reason that was given for another decision says so."""
    decided, _, why = read["reason"].partition(": ")
    decided = RENAMED.get(decided, decided)
    read = {**read, "decision": RENAMED.get(read["decision"], read["decision"])}
    known: dict[str, Collection[str]] = {"kind": KINDS, "decision": list(Decision), "reason_code": list(ReasonCode)}
    for key, values in known.items():
        if key in read and read[key] not in values:
            raise PlanError(
                f"{path}, line {read['line']}: subgraph '{read['name']}': unknown {key} '{read[key]}'; one of "
                f"{', '.join(values)}"
            )
    code = ReasonCode(read["reason_code"]) if "reason_code" in read else None
    reason = read["reason"]
    if decided == read["decision"]:
        reason = why
    elif decided in list(Decision):
        reason, code = f"edited; {decided} was planned: {why}", ReasonCode.EDITED
    return PlannedSubgraph(**{**read, "decision": Decision(read["decision"]), "reason": reason, "reason_code": code})


def facts(subgraph: Subgraph) -> dict[str, Any]:
    """The facts about its subgraph in an entry, beside the name, which no edit can change."""
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


def settled(entries: Sequence[PlannedSubgraph], found: Iterable[Subgraph]) -> list[PlannedSubgraph]:
    """`entries`, in which those that cannot be carried out beside others are kept: layers with parts of another
    precision. `found`: the model's subgraphs."""
    by_name = {subgraph.name: subgraph for subgraph in found}
    kept = []
    for entry in entries:
        if (why := kind_of(entry).conflict(entry, by_name[entry.name], entries)) is not None:
            code = ReasonCode.ACCURACY_BUDGET
            entry = replace(entry, decision=Decision.KEEP, op="", reason=why, reason_code=code)
        kept.append(entry)
    return kept
