"""Request, outcome and cost of a build: OUT.report.json and the table on the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import psutil

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.records.contents import (
    Accuracy,
    BudgetOutcome,
    ExportOptions,
    Network,
    PluginWeights,
    ReportedSubgraph,
    Roofline,
    TensorAgreement,
    TokenBytes,
)
from trt_nvfp4.builder.records.json_types import misfits
from trt_nvfp4.builder.report.command_line import command_line
from trt_nvfp4.builder.roofline.profile_times import profiles_line
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, KINDS
from trt_nvfp4.graph_passes.planning.planned import has_ranges
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode

if TYPE_CHECKING:
    from rich.table import Table

    from trt_nvfp4.graph_passes.planning.plan import Plan

# The option that selects linears beside the default kinds.
LINEARS_TOO = f"--kinds {','.join(ALL_KINDS)}"


@dataclass
class Report:
    """The contents of OUT.report.json. Bytes and seconds; paths as given."""

    # Absolute: baselines are built from it, maybe in another folder.
    model: str
    target: str
    # The command that made it, and when (UTC).
    command: str = field(default_factory=command_line.get)
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    # Inputs and outputs by name, in words: `int64 [batch, sequence]`.
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    # How a Hugging Face directory was exported.
    exported: ExportOptions | None = None
    recipe: str | None = None
    backend: str | None = None
    engine: str | None = None
    engine_bytes: int | None = None
    engine_sha256: str | None = None
    # Size of the library that the engine carries; or the name of the one that lies beside it.
    plugin_library_bytes: int | None = None
    plugin_library: str | None = None
    # Groups of kernels that were linked into it (see plugins/compile/kernel_groups.py).
    kernels: list[str] = field(default_factory=list)
    # For an engine without the plugins' weights.
    plugin_weights: PluginWeights | None = None
    bundle: str | None = None
    subgraphs: list[ReportedSubgraph] = field(default_factory=list)
    # Types outside of replaced subgraphs; None before there is a plan.
    network: Network | None = None
    # Products that the plan has no entry for, by operator.
    unplanned: dict[str, dict[str, float]] = field(default_factory=dict)
    weights_bytes: dict[str, int] = field(default_factory=dict)
    plugin_layers: int | None = None
    budget: BudgetOutcome | None = None
    # Min, opt and max shape by input.
    profiles: dict[str, list[list[int]]] = field(default_factory=dict)
    # Min, opt and max values of inputs whose values are a shape.
    shape_values: dict[str, list[list[int]]] = field(default_factory=dict)
    # Caches that the engine updates at their own address.
    caches_in_place: int = 0
    # The engine's second optimization profile, with which a decoder generates token by token.
    decode_profiles: dict[str, list[list[int]]] = field(default_factory=dict)
    # None before there is a plan.
    predicted: Roofline | None = None
    # Only for decoders.
    token_bytes: TokenBytes | None = None
    # None before the model is rewritten.
    accuracy: Accuracy | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record the seconds of a stage and the memory peak so far."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings_s[stage] = round(time.monotonic() - started, 3)
            self.record_peak(0)

    def record_peak(self, child_bytes: int) -> None:
        """Note this process's peak, and that of a process that it ran together with what this one holds beside it."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        beside = psutil.Process().memory_info().rss if child_bytes else 0
        self.peak_rss_bytes = max(self.peak_rss_bytes, own, beside + child_bytes)

    def take_plan(self, plan: Plan, calibrated: bool | Collection[str]) -> None:
        """List the planned subgraphs, none of them realized yet, and the recipe of NVFP4 weights; warn without NVFP4
        where no other precision was chosen. `calibrated`: as in `PlanOptions`.
        """
        network = plan.activations
        self.network = {"type": network.type, "note": network.note, "float32": dict(network.float32)}
        self.recipe = plan.recipe if any(entry.lowering.weights == "nvfp4" for entry in plan.subgraphs) else None
        if not any(entry.lowering.meets("nvfp4") for entry in plan.subgraphs) and plan.precision not in ("fp8", "bf16"):
            self.warnings.append(
                "no subgraph of the plan is in NVFP4, for the reasons in the plan; --require nvfp4 makes that an error"
            )
        self.subgraphs = [
            {
                "name": subgraph.name,
                "kind": subgraph.kind,
                "nodes": list(subgraph.nodes),
                "shapes": dict(subgraph.shapes),
                "decision": str(subgraph.decision),
                "reason": subgraph.reason,
                "reason_code": None if subgraph.reason_code is None else str(subgraph.reason_code),
                "activations": subgraph.lowering.activations[0 if has_ranges(subgraph, calibrated) else 1],
                "kernels": subgraph.kernels,
                "residual_channels": subgraph.residual_channels,
                "realized": None,
            }
            for subgraph in plan.subgraphs
        ]

    def take_engine(self, result: Mapping[str, Any]) -> None:
        """Add the results of the build script."""
        for name in ("backend", "engine", "engine_bytes", "engine_sha256", "plugin_layers", "plugin_library"):
            setattr(self, name, result[name])
        self.plugin_weights, self.caches_in_place = result["weights"], result["caches_in_place"]
        self._take_products(result["float32_products"])
        realized = {entry["name"]: entry["realized"] for entry in result["subgraphs"]}
        for subgraph in self.subgraphs:
            subgraph["realized"] = realized.get(subgraph["name"], "as in the model")
        self.versions.update(result["versions"])
        self.warnings.extend(result["warnings"])
        self.record_peak(result["peak_rss_bytes"])

    def _take_products(self, names: list[str]) -> None:
        """Note the products that the engine computes in float32; warn where the plan has them in 16 bits."""
        assert self.network is not None, "an engine is of a plan"
        self.network["float32_products"] = names
        if self.network["type"] == "keep":
            return
        planned = {name for nodes in self.network["float32"].values() for name in nodes}
        if others := [name for name in names if name not in planned]:
            self.warnings.append(
                f"the engine multiplies in float32 where the plan does in {self.network['type']}: "
                f"{', '.join(others[:4])}{f' and {len(others) - 4} more' if len(others) > 4 else ''}"
            )

    def tables(self) -> Iterator[Table]:
        """For the terminal."""
        yield from subgraph_tables(self.subgraphs)
        yield summary_table(self)

    def save(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(self.json() + "\n")

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str)


def load(path: Path) -> Report:
    """The contents of OUT.report.json. Raises UsageError for any other file, and for a report of a version
    whose reports hold other things."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict) or not {"subgraphs", "timings_s"} <= found.keys():
        raise UsageError(f"{path}: not a report of build-engine")
    _complete(found)
    missing = {entry.name for entry in fields(Report)} - found.keys()
    entries: list[Any] = found["subgraphs"] if isinstance(found["subgraphs"], list) else [None]
    if missing or not all(
        isinstance(entry, dict) and entry.keys() >= ReportedSubgraph.__annotations__.keys() for entry in entries
    ):
        lacks = f": it lacks {', '.join(sorted(missing))}" if missing else ""
        raise UsageError(f"{path}: not a report of this version of build-engine{lacks}; build again to have one")
    types = get_type_hints(Report)
    if found["engine"]:
        types["engine_bytes"] = int  # which an engine has
    if wrong := misfits(found, types):
        raise UsageError(f"{path}: no report of build-engine: its {wrong[0]}; build again to have one")
    return Report(**{entry.name: found[entry.name] for entry in fields(Report)})


def _complete(found: dict[str, Any]) -> None:
    """Adds what reports of earlier versions lack, as far as a value says that it is not known."""
    # Before --strip, and before these were listed.
    earlier: dict[str, Any] = {"plugin_weights": None, "exported": None, "command": "", "date": ""}
    for name, nothing in (earlier | {"inputs": {}, "outputs": {}}).items():
        found.setdefault(name, nothing)
    # An empty object was what is None today.
    for name in ("network", "budget", "predicted", "token_bytes", "accuracy"):
        if found.get(name) == {}:
            found[name] = None
    for entry in found["subgraphs"] if isinstance(found["subgraphs"], list) else []:
        if isinstance(entry, dict):
            for name in ("reason_code", "residual_channels"):  # before there were such
                entry.setdefault(name, None)


def versions() -> dict[str, str]:
    """Versions of what the result depends on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in ("trt-nvfp4", "onnx", "onnxruntime", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def not_asked_for(entry: ReportedSubgraph) -> bool:
    """Whether this is a linear that stays only because `--kinds` does not name linears."""
    return _unselected(entry) == "count"


def _unselected(entry: ReportedSubgraph) -> str:
    """How reports show a subgraph that `--kinds` does not select; "" for selected ones."""
    kind = KINDS.get(entry["kind"])
    return "" if kind is None or entry["reason_code"] != ReasonCode.KIND else kind.unselected_in_reports


def subgraph_tables(subgraphs: Sequence[ReportedSubgraph]) -> list[Table]:
    """One row per subgraph that is replaced or refused, equal layers in one, and what was decided why.

    Linears that nobody asked to replace are only counted; of whole layers, whose parts are listed, nothing is said.
    """
    from rich.table import Table

    from trt_nvfp4.builder.terminal.tables import brief_names, equal_reasons, equal_rows, grid

    subgraphs = [entry for entry in subgraphs if _unselected(entry) != "hide"]
    left_alone = [entry for entry in subgraphs if not_asked_for(entry)]
    shown = [entry for entry in subgraphs if not not_asked_for(entry)]
    table = grid("Subgraphs", ["name", "x", "kind", "shape", "decision", "built"], numbers=["x"])
    for name, cells, count in equal_rows((entry["name"], _cells(entry)) for entry in shown):
        table.add_row(name, str(count), *cells)
    reasons = Table(show_header=False, box=None, pad_edge=False)
    for names, decision, reason in equal_reasons((e["name"], e["decision"], e["reason"]) for e in shown):
        reasons.add_row(f"{len(names)} {decision}", f"{brief_names(names)}: {reason}")
    on_kernels: dict[str, list[str]] = {}
    for entry in shown:
        if entry["kernels"]:
            on_kernels.setdefault(entry["kernels"], []).append(entry["name"])
    for kernels, names in on_kernels.items():
        name, _, why = kernels.partition(": ")
        reasons.add_row(f"{len(names)} on {name}", f"{brief_names(names)}: {why}")
    if left_alone:
        reasons.add_row(f"{len(left_alone)} keep", f"linears outside of MLPs; {LINEARS_TOO} replaces those that can be")
    return [table, reasons]


def _cells(entry: ReportedSubgraph) -> list[str]:
    """Cells of the table of subgraphs beside the name."""
    return [entry["kind"], _shape(entry["shapes"]), entry["decision"], entry["realized"] or "-"]


def unplanned_line(report: Report) -> str:
    """The products that the plan has no entry for, in one line; empty without any."""
    parts = [f"{found['count']} {op_type} ({found['share']:.1%})" for op_type, found in report.unplanned.items()]
    return ", ".join(parts).replace("%)", "% of weight bytes)", 1)


def budget_line(report: Report) -> str:
    """The outcome of an accuracy budget, in one line; empty without a budget."""
    from trt_nvfp4.builder.accuracy.budget import Budget

    if (budget := report.budget) is None:
        return ""
    achieved = budget["achieved"]
    shown = "no error" if achieved is None else Budget.parse(budget["budget"]).shown(achieved)
    # Older reports have no original's figure.
    original = budget.get("original")
    beside = "" if original is None else f" (original: {original:.6g}; each sample is read from its first token)"
    found = f"{shown}{beside} on {budget['held_out_samples']} held-out samples"
    return f"{budget['budget']}: {found}, roofline {budget['roofline_us']:.3g} us"


def _shape(shapes: Mapping[str, int]) -> str:
    """Widths from input to output, then how often: in how many layers, or for how many of the experts."""
    names = ("in_features", "intermediate_features", "out_features")
    text = "-".join(str(shapes[name]) for name in names if name in shapes)
    if "capacity" in shapes:
        text = f"{shapes['heads']}/{shapes['kv_heads']} x {shapes['head_dim']} over {shapes['capacity']}"
    if shapes.get("layers", 1) > 1:
        text += f" x{shapes['layers']}"
    if "experts" in shapes:
        text += f" x{shapes['top_k']} of {shapes['experts']}"
        text += f" + shared {shapes['shared_features']}" if shapes.get("shared_features") else ""
    return text


def network_line(report: Report) -> str:
    """The types outside of replaced subgraphs, in one line; empty where they are the model's."""
    network = report.network
    if network is None or network["type"] == "keep":
        return ""
    stays = ", ".join(f"{len(nodes)} nodes: {reason}" for reason, nodes in network["float32"].items())
    line = f"{network['type']} instead of float32" + (f"; float32 stay {stays}" if stays else "")
    if (products := network.get("float32_products")) is not None:
        line += f"; the engine multiplies in float32: {', '.join(products) or 'nowhere'}"
    return line


def accuracy_line(report: Report) -> str:
    """The worst output and subgraph and a decoder's steps, as measured, in one line; empty where nothing was."""
    found = report.accuracy or Accuracy()

    def worst(rows: list[TensorAgreement], kind: str) -> str:
        ranked = [(row["cosine"], row["name"]) for row in rows if row["kind"] == kind and row["cosine"] is not None]
        cosine, name = min(ranked, default=(None, ""))
        return "" if cosine is None else f"{kind} {name} {cosine:.5f}"

    rows = found.get("tensors", [])
    parts = [f"worst {text}" for kind in ("output", "subgraph") if (text := worst(rows, kind))]
    if parts and (unreplaced := worst(found.get("network", []), "output")):
        precision = "16 bits" if report.network is None else report.network["type"]
        parts.append(f"only the network in {precision}: {unreplaced}")
    if decoding := found.get("steps"):
        worst_kl = max(step["kl_worst"] for step in decoding["steps"])
        kl = f"KL {decoding['kl']:.2g} (worst {worst_kl:.2g})"
        parts.append(f"{len(decoding['steps'])} steps over the caches: {kl}, {decoding['top1']:.1%} the same token")
    samples = found.get("samples", 0)
    if not parts:
        return ""
    apart = "not calibrated on" if found.get("held_out") else "calibrated on, too"
    return f"cosine, {samples} sample{'s' if samples != 1 else ''} ({apart}): {'; '.join(parts)}"


def token_line(report: Report) -> str:
    """Bytes that a decoder reads for each generated token, in one line; empty for other models."""
    from rich.filesize import decimal

    found = report.token_bytes
    if found is None:
        return ""
    parts = [f"{decimal(int(size))} of weights in {decision}" for decision, size in found["quantized"].items()]
    if kept := found["kept"]:
        largest = ", ".join(f"{name} {decimal(int(size))}" for name, size in list(kept.items())[:2])
        more = f", {len(kept) - 2} more" if len(kept) > 2 else ""
        parts.append(f"{decimal(int(sum(kept.values())))} not quantized ({largest}{more})")
    parts.append(f"{decimal(int(found['cache_bytes']))} of caches ({found['cache_tokens']} tokens)")
    if found["state_bytes"]:
        parts.append(f"{decimal(int(found['state_bytes']))} of states")
    return (
        f"{decimal(int(found['total']))}: {'; '.join(parts)}; at most {found['at_most']:.0f} tokens/s by the "
        f"bandwidth of {found['gpu']} (one sequence; a bound, nothing was run)"
    )


def input_lines(report: Report) -> dict[str, str]:
    """Type, dimensions and range of each input in every profile of the engine."""
    lines = dict(report.inputs)
    for profiles, of in ((report.profiles, ""), (report.decode_profiles, " (decode)")):
        for name, shapes in profiles.items():
            lines[name] = f"{lines.get(name, '')}; {range_text(shapes)}{of}".removeprefix("; ")
    for name, shapes in report.shape_values.items():
        lines[name] = f"{lines.get(name, '')}; values {range_text(shapes, ',')}".removeprefix("; ")
    return lines


def range_text(shapes: Sequence[Sequence[int]], between: str = "x") -> str:
    """Min, opt and max shape in words."""
    low, middle, high = (between.join(map(str, shape)) for shape in shapes)
    return f"{low} to {high}, tuned for {middle}"


def summary_table(report: Report) -> Table:
    """Sizes, times and files."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from trt_nvfp4.builder.terminal.tables import equal_rows

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("target", f"{report.target}" + (f" ({report.backend})" if report.backend else ""))
    for what, lines in (("input", input_lines(report)), ("output", report.outputs)):
        for name, (line,), _ in equal_rows((name, [line]) for name, line in lines.items()):
            table.add_row(what, f"{name}: {line}")
    if report.recipe:
        table.add_row("NVFP4 recipe", report.recipe)
    if weights := report.weights_bytes:
        ratio = weights["before"] / max(weights["after"], 1)
        table.add_row("weights", f"{decimal(weights['before'])} -> {decimal(weights['after'])} ({ratio:.2f}x smaller)")
    if unplanned := unplanned_line(report):
        table.add_row("not in the plan", f"{unplanned} stay as they are")
    if network := network_line(report):
        table.add_row("network", network)
    if budget := budget_line(report):
        table.add_row("accuracy budget", budget)
    if times := profiles_line(report.predicted):
        table.add_row("profiles", times)
    if reads := token_line(report):
        table.add_row("read per token", reads)
    if accuracy := accuracy_line(report):
        table.add_row("accuracy", accuracy)
    if report.engine and report.engine_bytes is not None:
        carried = report.plugin_library_bytes
        of_which = f", of which plugin library {decimal(carried)}" if carried else ""
        table.add_row("engine", f"{report.engine} ({decimal(report.engine_bytes)}{of_which}), verified")
        if beside := report.plugin_weights:
            size = decimal(beside["bytes"])
            table.add_row("its weights", f"{beside['tensors']} of plugins in {beside['file']} ({size})")
        table.add_row("plugin layers", str(report.plugin_layers))
    if report.bundle:
        table.add_row("bundle", f"{report.bundle} (run build_engine.py in it on the device)")
    timings = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.timings_s.items())
    table.add_row("seconds", timings)
    table.add_row("peak memory", f"{decimal(report.peak_rss_bytes)} resident, mapped files included")
    for what, file in report.files.items():
        table.add_row(what, file)
    for warning in report.warnings:
        table.add_row(Text("warning", style="yellow"), warning)
    return table
