"""OUT.report.html: one page about a build, from its report and, where there is one, its benchmark.

Self-contained: no script, font or picture from elsewhere. This module makes the content; `report.html.jinja` lays it
out and escapes every value.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, TemplateError
from markupsafe import Markup
from rich.filesize import decimal

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.records.contents import (
    Accuracy,
    Prediction,
    ReportedSubgraph,
    TensorAgreement,
    WeighedPrecision,
)
from trt_nvfp4.builder.report import charts as svg_charts
from trt_nvfp4.builder.report import report as build_report
from trt_nvfp4.builder.report.report import Report, input_lines
from trt_nvfp4.builder.roofline.profile_times import PREFILL, products, profiles_line
from trt_nvfp4.builder.terminal.tables import brief_names, equal_rows
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.lowerings.registry import FP8_PLUGIN
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode

LOW_SQNR_DB = 12.0
CONTESTANTS = {"nvfp4": "as planned", "native_nvfp4": "TRT NVFP4", "fp8": "FP8", "bf16": "BF16"}


def write(report: Path) -> Path:
    """Write the page beside OUT.report.json; returns its path. Raises UsageError for any other file.

    OUT.bench.json is shown where it is newer: an older one timed what an earlier build left.
    """
    built = build_report.load(report)
    base = report.name.removesuffix(".report.json")
    measured = report.with_name(base + ".bench.json")
    newer = measured.is_file() and measured.stat().st_mtime_ns >= report.stat().st_mtime_ns
    destination = report.with_name(base + ".report.html")
    try:
        bench = read_json(measured) if newer else None
        written = page(built, bench, base)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TemplateError) as error:
        raise UsageError(
            f"{report}: no page can be made of it and of {measured.name} beside it ({error!r}); build again"
        ) from error
    with replacing(destination) as temporary:
        temporary.write_text(written, encoding="utf-8")
    return destination


@dataclass(frozen=True)
class Figure:
    """A chart, which is SVG, and its caption."""

    chart: Markup
    caption: str


@dataclass(frozen=True)
class Link:
    """To a file beside the page."""

    href: str
    text: str


#: A cell: its text, (text, CSS class), or a link.
Cell = str | tuple[str, str] | Link
#: Needs torch for memory on the GPU.
SNIPPET = """\
import torch, {module} as trt

runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
{plugins}
engine = runtime.deserialize_cuda_engine(open({engine}, "rb").read())
context = engine.create_execution_context()
for name, shape in {shapes}.items():
    if not context.set_input_shape(name, shape):
        raise RuntimeError(f"the engine does not take {{name}} of shape {{shape}}")
types = {{trt.float32: torch.float32, trt.float16: torch.float16, trt.bfloat16: torch.bfloat16, trt.int64: torch.int64,
         trt.int32: torch.int32, trt.int8: torch.int8, trt.bool: torch.bool}}
tensors = {{}}
for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):  # your inputs in place of these zeros
    shape, dtype = tuple(context.get_tensor_shape(name)), types[engine.get_tensor_dtype(name)]
    tensors[name] = torch.zeros(shape, dtype=dtype, device="cuda")
    context.set_tensor_address(name, tensors[name].data_ptr())
if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
    raise RuntimeError("TensorRT could not run the engine")
torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Table:
    """Its name for screen readers, (heading, CSS class) of each column, and its rows."""

    label: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Summary:
    """A table and its summary."""

    table: Table
    line: str


def page(report: Report, bench: Mapping[str, Any] | None, name: str) -> str:
    """The whole page. `bench`: the contents of OUT.bench.json."""
    return _template().render(
        name=name,
        report=report,
        style=Markup(resources.files(__package__).joinpath("report.css").read_text()),
        state=_state(report),
        facts=_facts(report),
        warnings=report.warnings,
        interface=_interface(report),
        budget=_budget(report),
        snippet=_snippet(report),
        no_snippet=_no_snippet(report),
        speed=_speed(report, bench),
        sizes=_sizes(report),
        profiles=_profiles(report),
        token_bytes=_token_bytes(report),
        accuracy=_accuracy(report),
        roofline=_roofline(report),
        plan=_plan(report),
        unplanned=build_report.unplanned_line(report),
        next_steps=_next_steps(report, bench),
        build=_build(report),
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["options"] = _unbroken_options
    return environment.from_string(resources.files(__package__).joinpath("report.html.jinja").read_text())


def _unbroken_options(html: Markup) -> Markup:
    """A line may end before an option, and not between its hyphens."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r'<span class="option">\g<0></span>', str(html)))


def _state(report: Report) -> tuple[str, str]:
    if report.engine:
        return "engine verified: built as planned", "good"
    if report.bundle:
        return "bundle: to be built on the device", "warn"
    return "no engine built yet", "warn"


def _facts(report: Report) -> dict[str, str]:
    replaced = [entry for entry in report.subgraphs if entry["decision"] != "keep"]
    decisions = Counter(entry["decision"] for entry in replaced)
    facts = {
        "target": report.target,
        "subgraphs replaced": f"{len(replaced)} of {len(report.subgraphs)}",
        "decisions": ", ".join(f"{count} {decision}" for decision, count in decisions.items()) or "none",
    }
    if weights := report.weights_bytes:
        facts["weights"] = f"{weights['before'] / max(weights['after'], 1):.2f}x smaller"
    if report.engine_bytes:
        facts["engine"] = decimal(report.engine_bytes)
    return facts


def _speed(report: Report, bench: Mapping[str, Any] | None) -> Figure | None:
    roofline = report.predicted
    if bench is not None:
        key = "predicted_us" if bench["mode"] == "roofline" else "median_us"
        values = {name: times[key] for name, times in bench["contestants"].items()}
        environment = bench["environment"]
        gpu = environment.get("before", environment).get("gpu", bench["target"])
        caption = ". ".join([f"{bench['label']} ({gpu})", *bench.get("notes", [])])
    elif roofline is not None and (predicted := products(roofline["subgraphs"]) or roofline["subgraphs"]):
        values = {
            name: sum(entry["predicted_us"][name] for entry in predicted) for name in predicted[0]["predicted_us"]
        }
        caption = (
            f"Predicted, nothing was run: the least time on {roofline['gpu']} at its published peaks, "
            f"{_tokens(predicted)} tokens, of {roofline['of']}, attention apart. Run bench-engine on the device to "
            "measure."
        )
    else:
        return None
    shown = {CONTESTANTS[name]: value for name, value in values.items()}
    chart = svg_charts.bars(shown, "us", "as planned", "Microseconds as planned and of the baselines")
    return Figure(Markup(chart), caption)


def _tokens(subgraphs: Sequence[Prediction]) -> str:
    """How many, or from the fewest to the most."""
    counts = {entry["tokens"] for entry in subgraphs}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"


def _accuracy(report: Report) -> dict[str, Any]:
    found = report.accuracy or Accuracy()
    lines = {"Budget": build_report.budget_line(report), "Network": build_report.network_line(report)}
    lines["Measured"] = build_report.accuracy_line(report)
    if not found.get("tensors"):
        why = found.get("not_measured", "this run rewrote no model")
        return {"lines": lines, "figure": None, "not_measured": why}
    rows = sorted(found["tensors"], key=lambda row: row["kind"] == "output")
    points = [(row["name"], _decibels(row), row["kind"] == "output") for row in rows]
    chart = svg_charts.by_layer(points, "Signal to quantization noise in dB, layer by layer")
    samples = f"{found['samples']} sample{'s' if found['samples'] != 1 else ''}"
    caption = f"SQNR in dB against the original, {samples}, with earlier layers' errors. Gray: the outputs."
    cells = [
        [
            row["name"],
            row["kind"],
            "-" if row["cosine"] is None else f"{row['cosine']:.6f}",
            f"{_decibels(row):.2f}".replace("-inf", "none").replace("inf", "equal"),
            "-" if row["max_abs"] is None else f"{row['max_abs']:.4g}",
            f"{row['argmax']:.2%}",
        ]
        for row in rows
    ]
    numbers = ("cosine (worst)", "SQNR dB", "max abs", "argmax equal")
    columns = [("tensor", "name"), ("kind", ""), *((heading, "n") for heading in numbers)]
    return {
        "lines": lines,
        "figure": Figure(Markup(chart), caption),
        "table": Table("Accuracy by layer", columns, cells),
    }


def _decibels(row: TensorAgreement) -> float:
    """JSON's null is infinite: equal tensors, or a difference that is not finite or has no signal."""
    if row["sqnr_db"] is not None:
        return float(row["sqnr_db"])
    return math.inf if row["max_abs"] == 0 else -math.inf


def _roofline(report: Report) -> Figure | None:
    found = report.predicted
    if found is None or not found["subgraphs"]:
        return None
    points = {
        (
            f"{entry['decision']}, {entry['tokens']} tokens, bound by {entry['bound']}: "
            f"{svg_charts.number(entry['predicted_us']['nvfp4'])} us",
            entry["operations"] / entry["bytes"],
            entry["operations"] / entry["predicted_us"]["nvfp4"] * 1e6,
        )
        for entry in found["subgraphs"]
    }
    chart = svg_charts.roofline(found["bandwidth"], found["tflops"], sorted(points), "Roofline of the target")
    bound = Counter(entry["bound"] for entry in found["subgraphs"])
    kinds = Counter(entry["kind"] for entry in found["subgraphs"])
    total = sum(entry["bytes"] for entry in found["subgraphs"])
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    caption = (
        f"{found['gpu']}: operations per second that {shown} can reach at most "
        f"({', '.join(f'{count} bound by {by}' for by, count in bound.items())}); {decimal(int(total))} to move. "
        f"A prediction. Peaks: {found['source']}."
    )
    return Figure(Markup(chart), caption)


def _token_bytes(report: Report) -> Summary | None:
    found = report.token_bytes
    if found is None:
        return None
    parts = {f"weights, {decision}": size for decision, size in found["quantized"].items()}
    parts |= {f"not quantized: {name}": size for name, size in found["kept"].items()}
    parts[f"caches of {found['cache_tokens']} tokens"] = found["cache_bytes"]
    parts["states, read and written"] = found["state_bytes"]
    rows = [(name, decimal(int(size))) for name, size in (*parts.items(), ("all", found["total"]))]
    line = (
        f"At most {found['at_most']:.0f} tokens per second of one sequence: all that a token reads, caches included, "
        f"by the bandwidth of {found['gpu']}. A bound, nothing was run."
    )
    return Summary(Table("Bytes read for each token", [("what", ""), ("bytes", "n")], rows), line)


def _profiles(report: Report) -> Summary | None:
    """Each planned product in a prefill and in a decode step."""
    found = report.predicted
    if found is None or not (line := profiles_line(found)):
        return None
    kernels = {entry["name"]: entry["kernels"].split(":")[0] for entry in report.subgraphs}
    prefill = {entry["names"][0]: entry for entry in found[PREFILL]}
    each_row = []
    for entry in products(found["subgraphs"]):
        name = entry["names"][0]
        cells = [kernels.get(name, "")]
        for of in (prefill.get(name), entry):
            us = None if of is None else svg_charts.number(of["predicted_us"]["nvfp4"])
            cells += ["-"] * 3 if of is None else [str(of["tokens"]), str(us), of["bound"]]
        each_row.append((name, cells))
    rows = [[name, str(count), *cells] for name, cells, count in equal_rows(each_row)]
    each = [("us", "n"), ("bound by", "")]
    columns = [
        ("subgraphs, us of each", "name"),
        ("count", "n"),
        ("kernels", ""),
        ("prefill rows", "n"),
        *each,
        ("decode rows", "n"),
        *each,
    ]
    return Summary(Table("Prefill and decode", columns, rows), f"{line[0].upper()}{line[1:]}.")


def _sizes(report: Report) -> Figure | None:
    weights = report.weights_bytes
    if not weights:
        return None
    sizes = {"before": weights["before"] / 1e6, "after": weights["after"] / 1e6}
    if report.engine_bytes:
        sizes["engine"] = report.engine_bytes / 1e6
    chart = svg_charts.bars(sizes, "MB", "after", "Megabytes of weights before and after")
    caption = "All constants of the model, with what stays in 16 or 32 bits."
    if carried := report.plugin_library_bytes:
        caption += f" {decimal(carried)} of the engine are the plugin library."
    if beside := report.plugin_weights:
        caption += f" Weights of plugins, {decimal(beside['bytes'])}, lie beside the engine."
    return Figure(Markup(chart), caption)


def _plan(report: Report) -> Table:
    groups: dict[tuple[str, ...], list[ReportedSubgraph]] = {}
    for entry in sorted(report.subgraphs, key=lambda entry: entry["decision"] == "keep"):
        shape = ", ".join(f"{key.removesuffix('_features')} {value}" for key, value in entry["shapes"].items())
        built = entry["realized"] or ("as in the model" if entry["decision"] == "keep" else "not yet")
        key = (entry["kind"], shape, entry["decision"], built, entry["kernels"], entry["activations"], entry["reason"])
        groups.setdefault(key, []).append(entry)
    rows: list[list[Cell]] = []
    for (kind, shape, decision, built, kernels, activations, reason), entries in groups.items():
        names = brief_names([entry["name"] for entry in entries])
        tone = "bad" if built == "missing" else "dim" if decision == "keep" or built == "not yet" else "good"
        slow: Cell = (kernels, "warn") if kernels.startswith("generic") else kernels
        rows.append([names, str(len(entries)), kind, shape, decision, (built, tone), slow, activations, reason])
    plain = [(heading, "") for heading in ("kind", "shape", "decision", "built")]
    last = [("kernels", "reason"), ("activations", ""), ("reason", "reason")]
    columns = [("subgraphs", "name"), ("count", "n"), *plain, *last]
    return Table("Plan", columns, rows)


def _next_steps(report: Report, bench: Mapping[str, Any] | None) -> dict[str, Any]:
    """The facts that the page's advice depends on; empty without advice."""
    subgraphs = report.subgraphs
    rows = (report.accuracy or Accuracy()).get("tensors", [])
    outputs = [row for row in rows if row["kind"] == "output" and not row["discrete"]]
    worst = min(outputs, key=_decibels, default=None)
    is_bad = worst is not None and _decibels(worst) < LOW_SQNR_DB
    engine = shlex.quote(report.engine) if report.engine else None
    found = {
        "no_calibration": any(entry["reason_code"] == ReasonCode.NO_CALIBRATION for entry in subgraphs),
        "fp8_without_scales": any(entry["activations"] == FP8_PLUGIN.activations[1] for entry in subgraphs),
        "faster_in_w4a4": any(entry["reason_code"] == ReasonCode.FASTER_IN_W4A4 for entry in subgraphs),
        "faster_in_fp8": any(entry["reason_code"] == ReasonCode.FASTER_IN_FP8 for entry in subgraphs),
        "kept": sum(build_report.not_asked_for(entry) for entry in subgraphs),
        "worst": (worst["name"], f"{_decibels(worst):.1f}") if worst is not None and is_bad else None,
        "bundle": report.bundle,
        "unmeasured": engine is not None and (bench is None or bench["mode"] != "engine"),
        "engine": engine,
    }
    if not any(found.values()):
        return {}
    # As given: a directory's name does not say where it is.
    return found | {"linears_too": build_report.LINEARS_TOO, "model": shlex.quote(report.model)}


def _build(report: Report) -> Table:
    rows: list[tuple[Cell, Cell]] = [
        (key, value) for key, value in (("command", report.command), ("date (UTC)", report.date)) if value
    ]
    page = Path(report.files.get("page", "")).parent
    for key, file in report.files.items():
        beside = Path(file).parent == page and key != "page"
        rows.append((key, Link(Path(file).name, str(file)) if beside else str(file)))
    if report.engine_sha256:
        rows.append(("engine SHA-256", report.engine_sha256))
    if report.timings_s:
        rows.append(("seconds", ", ".join(f"{stage} {value:.1f}" for stage, value in report.timings_s.items())))
    rows.append(("peak memory", f"{decimal(report.peak_rss_bytes)} resident, mapped files included"))
    rows.append(("versions", ", ".join(f"{key} {value}" for key, value in report.versions.items())))
    return Table("The build", [("what", ""), ("is", "name")], rows)


def _interface(report: Report) -> Table | None:
    """Inputs and outputs; equal layers' caches in one row."""
    rows: list[Sequence[Cell]] = []
    for what, lines in (("input", input_lines(report)), ("output", report.outputs)):
        named = equal_rows((name, [line]) for name, line in lines.items())
        rows += [(what, name, line) for name, (line,), _ in named]
    columns = [("", ""), ("name", "name"), ("type, dimensions, range", "reason")]
    return Table("Inputs and outputs", columns, rows) if rows else None


def _precision(option: ReportedSubgraph | WeighedPrecision) -> str:
    """The decision, and the residual channels that were chosen with it."""
    count = option.get("residual_channels")  # older reports have none
    return f"{option['decision']}, {count} residual channels" if count else option["decision"]


def _budget(report: Report) -> Summary | None:
    """The candidate precisions of every subgraph, and the mixes that were measured."""
    found = report.budget
    if found is None:
        return None
    decided = {entry["name"]: _precision(entry) for entry in report.subgraphs}
    rows: list[Sequence[Cell]] = []
    for name, options in found["subgraphs"].items():
        for option in options:
            precision = _precision(option)
            taken = precision == decided.get(name)
            value = "no error" if option["value"] is None else f"{option['value']:.4g}"
            rows.append(
                (
                    name,
                    (precision, "good") if taken else precision,
                    value,
                    svg_charts.number(option["seconds"] * 1e6),
                    "chosen" if taken else "",
                )
            )
    columns = [("subgraph", "name"), ("precision", ""), (found["metric"], "n"), ("us", "n"), ("", "")]
    tried = "; ".join(
        f"{svg_charts.number(mix['roofline_us'])} us: "
        + ("no error" if mix["achieved"] is None else f"{mix['achieved']:.4g}")
        for mix in found["tried"]
    )
    line = (
        f"{found['metric']}: with only that subgraph in that precision, on {found['choosing_samples']} samples. Time: "
        f"the roofline's, nothing was run. Mixes that were measured, time and {found['metric']}: {tried}."
    )
    return Summary(Table("Precisions, accuracy and time", columns, rows), line)


def _no_snippet(report: Report) -> str | None:
    """Why the snippet does not suffice for the engine; None where it does."""
    if report.plugin_weights:
        return "The plugins' weights are inputs of this engine, in a file beside it"
    if report.caches_in_place:
        return "This engine updates its caches in place"
    if report.shape_values:
        return f"The values of {', '.join(report.shape_values)} are shapes, which TensorRT reads on the host"
    return None


def _snippet(report: Report) -> str | None:
    """Python that runs the engine once on zeros, with the opt shapes of its first profile; None without an engine, and
    for one that takes more than that."""
    if report.engine is None or _no_snippet(report):
        return None
    module = "tensorrt_rtx" if str(report.backend).startswith("tensorrt_rtx") else "tensorrt"
    shapes = {name: tuple(opt) for name, (_, opt, _) in report.profiles.items()}
    plugins = "runtime.engine_host_code_allowed = True  # the plugin library is code: only for engines that you trust"
    if library := report.plugin_library:
        plugins = f"runtime.get_plugin_registry().load_library({Path(library).name!r})  # code: only if you trust it"
    return SNIPPET.format(module=module, plugins=plugins, engine=repr(Path(report.engine).name), shapes=shapes)
