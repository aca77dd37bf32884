"""OUT.report.html: one page that says what a build did, from its report and, where there is one, its benchmark.

Self-contained: no script, no font, no picture from elsewhere.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.profile_times import PREFILL, products, profiles_line
from trt_nvfp4.builder.report import charts as svg_charts
from trt_nvfp4.builder.report import report as build_report
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.lowerings.registry import FP8_PLUGIN
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode

LOW_SQNR_DB = 12.0
CONTESTANTS = {"nvfp4": "as planned", "native_nvfp4": "TRT NVFP4", "fp8": "FP8", "bf16": "BF16"}


def write(report: Path) -> Path:
    """Write the page beside OUT.report.json; returns its path. Raises BuilderError (usage) for any other file.

    OUT.bench.json is shown where it is newer: an older one timed what an earlier build left.
    """
    built = build_report.load(report)
    base = report.name.removesuffix(".report.json")
    measured = report.with_name(base + ".bench.json")
    newer = measured.is_file() and measured.stat().st_mtime_ns >= report.stat().st_mtime_ns
    destination = report.with_name(base + ".report.html")
    try:
        bench = parse_json(measured.read_text(encoding="utf-8")) if newer else None
        written = page(built, bench, base)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BuilderError(
            USAGE, f"{report}: no page can be made of it and of {measured.name} beside it ({error!r}); build again"
        ) from error
    with replacing(destination) as temporary:
        temporary.write_text(written, encoding="utf-8")
    return destination


def page(report: Mapping[str, Any], bench: Mapping[str, Any] | None, name: str) -> str:
    """The whole page. `report` and `bench`: the contents of OUT.report.json and OUT.bench.json."""
    style = resources.files(__package__).joinpath("report.css").read_text()
    sections = [
        _section("Speed against baselines", _speed(report, bench)),
        _section("Size of the weights", _sizes(report)),
        _section("Prefill and decode", _profiles(report)),
        _section("Read for each generated token", _token_bytes(report)),
        _section("Accuracy by layer", _accuracy(report)),
        _section("Roofline", _roofline(report)),
        _section("Plan, and what TensorRT built", _plan(report), wide=True),
        _section("What to try next", _next_steps(report, bench, name), wide=True),
        _section("The build", _build(report), wide=True),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: trt-nvfp4 report</title><style>{style}</style></head>\n<body><main>\n"
        f"{_head(report, name)}\n<div class='grid'>\n{''.join(filter(None, sections))}</div>\n</main></body></html>\n"
    )


def _section(title: str, body: str, wide: bool = False) -> str:
    return f"<section{' class=wide' if wide else ''}><h2>{title}</h2>{body}</section>\n" if body else ""


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str, classes: Sequence[str]) -> str:
    """Cells are HTML already. Scrolls sideways within itself, by keyboard too."""
    head = "".join(f'<th scope="col" class="{kind}">{h}</th>' for h, kind in zip(headings, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(report: Mapping[str, Any], name: str) -> str:
    if report.get("engine"):
        state = '<span class="badge good">engine verified: built as planned</span>'
    elif report.get("bundle"):
        state = '<span class="badge warn">bundle: to be built on the device</span>'
    else:
        state = '<span class="badge warn">no engine built yet</span>'
    replaced = [entry for entry in report["subgraphs"] if entry["decision"] != "keep"]
    decisions = Counter(entry["decision"] for entry in replaced)
    facts = {
        "target": report["target"],
        "subgraphs replaced": f"{len(replaced)} of {len(report['subgraphs'])}",
        "decisions": ", ".join(f"{count} {decision}" for decision, count in decisions.items()) or "none",
    }
    if weights := report.get("weights_bytes"):
        facts["weights"] = f"{weights['before'] / max(weights['after'], 1):.2f}x smaller"
    if report.get("engine_bytes"):
        facts["engine"] = decimal(report["engine_bytes"])
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return (
        f"<h1>{escape(name)}</h1><p class='dim'>from <code>{escape(report['model'])}</code> {state}</p>"
        f"<dl class='facts'>{listed}</dl>"
    )


def _speed(report: Mapping[str, Any], bench: Mapping[str, Any] | None) -> str:
    predicted = report.get("predicted", {}).get("subgraphs", [])
    if bench is not None:
        key = "predicted_us" if bench["mode"] == "roofline" else "median_us"
        values = {name: times[key] for name, times in bench["contestants"].items()}
        environment = bench["environment"]
        gpu = environment.get("before", environment).get("gpu", bench["target"])
        caption = ". ".join([f"{bench['label']} ({gpu})", *bench.get("notes", [])])
    elif predicted:
        values = {
            name: sum(entry["predicted_us"][name] for entry in predicted) for name in predicted[0]["predicted_us"]
        }
        caption = (
            f"Predicted, nothing was run: the least time on {report['predicted']['gpu']} at its published peaks, "
            f"{_tokens(predicted)} tokens, of {report['predicted']['of']}. Run bench-engine on the device to measure."
        )
    else:
        return "<p class='dim'>No subgraph was replaced, or the model was not at hand to predict from.</p>"
    shown = {CONTESTANTS[name]: value for name, value in values.items()}
    chart = svg_charts.bars(shown, "us", "as planned", "Microseconds as planned and of the baselines")
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _tokens(subgraphs: Sequence[Mapping[str, Any]]) -> str:
    """How many, or from the fewest to the most."""
    counts = {entry["tokens"] for entry in subgraphs}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"


def _accuracy(report: Mapping[str, Any]) -> str:
    lines = {"Budget": build_report.budget_line(report), "Network": build_report.network_line(report)}
    lines["Measured"] = build_report.accuracy_line(report)
    said = "".join(f"<p>{what} {escape(line)}.</p>" for what, line in lines.items() if line)
    return said + _agreement(report)


def _agreement(report: Mapping[str, Any]) -> str:
    found = report.get("accuracy", {})
    if not found.get("tensors"):
        return f"<p class='dim'>Not measured: {escape(found.get('not_measured', 'this run rewrote no model'))}.</p>"
    rows = sorted(found["tensors"], key=lambda row: row["kind"] == "output")
    points = [(row["name"], _decibels(row), row["kind"] == "output") for row in rows]
    chart = svg_charts.by_layer(points, "Signal to quantization noise in dB, layer by layer")
    samples = f"{found['samples']} sample{'s' if found['samples'] != 1 else ''}"
    caption = f"SQNR in dB against the original, {samples}, with earlier layers' errors. Gray: the outputs."
    cells = [
        [
            escape(row["name"]),
            escape(row["kind"]),
            "-" if row["cosine"] is None else f"{row['cosine']:.6f}",
            f"{_decibels(row):.2f}".replace("-inf", "none").replace("inf", "equal"),
            "-" if row["max_abs"] is None else f"{row['max_abs']:.4g}",
            f"{row['argmax']:.2%}",
        ]
        for row in rows
    ]
    headings = ["tensor", "kind", "cosine (worst)", "SQNR dB", "max abs", "argmax equal"]
    table = _table(headings, cells, "Accuracy by layer", ["name", "", "n", "n", "n", "n"])
    numbers = f"<details><summary>Numbers</summary>{table}</details>"
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>{numbers}"


def _decibels(row: Mapping[str, Any]) -> float:
    """JSON's null is infinite: equal tensors, or a difference that is not finite or has no signal."""
    if row["sqnr_db"] is not None:
        return float(row["sqnr_db"])
    return math.inf if row["max_abs"] == 0 else -math.inf


def _roofline(report: Mapping[str, Any]) -> str:
    found = report.get("predicted", {})
    if not found.get("subgraphs"):
        return ""
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
    total = sum(entry["bytes"] for entry in found["subgraphs"])
    caption = (
        f"{found['gpu']}: operations per second that {len(found['subgraphs'])} subgraphs can reach at most "
        f"({', '.join(f'{count} bound by {by}' for by, count in bound.items())}); {decimal(int(total))} to move. "
        f"A prediction. Peaks: {found['source']}."
    )
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _token_bytes(report: Mapping[str, Any]) -> str:
    found = report.get("token_bytes")
    if not found:
        return ""
    parts = {f"weights, {decision}": size for decision, size in found["quantized"].items()}
    parts |= {f"not quantized: {name}": size for name, size in found["kept"].items()}
    parts[f"caches of {found['cache_tokens']} tokens"] = found["cache_bytes"]
    rows = [(escape(name), escape(decimal(int(size)))) for name, size in (*parts.items(), ("all", found["total"]))]
    caption = (
        f"At most {found['at_most']:.0f} tokens per second of one sequence by the bandwidth of {found['gpu']}: "
        "a bound, nothing was run."
    )
    return _table(("what", "bytes"), rows, "Bytes read for each token", ("", "num")) + f"<p>{escape(caption)}</p>"


def _profiles(report: Mapping[str, Any]) -> str:
    """Each planned product in a prefill and in a decode step."""
    found = report.get("predicted", {})
    if not (line := profiles_line(found)):
        return ""
    kernels = {entry["name"]: str(entry.get("kernels", "")).split(":")[0] for entry in report["subgraphs"]}
    prefill = {entry["names"][0]: entry for entry in found[PREFILL]}
    rows = []
    for entry in products(found["subgraphs"]):
        cells = [escape(name := entry["names"][0]), escape(kernels.get(name, ""))]
        for of in (prefill.get(name), entry):
            cells += (
                ["-"] * 3
                if of is None
                else [
                    str(of["tokens"]),
                    svg_charts.number(of["predicted_us"]["nvfp4"]),
                    escape(of["bound"]),
                ]
            )
        rows.append(cells)
    headings = ["subgraph", "kernels", "prefill rows", "us", "bound by", "decode rows", "us", "bound by"]
    table = _table(headings, rows, "Prefill and decode", ["name", "", "n", "n", "", "n", "n", ""])
    return f"{table}<p>{escape(line[0].upper() + line[1:])}.</p>"


def _sizes(report: Mapping[str, Any]) -> str:
    weights = report.get("weights_bytes")
    if not weights:
        return "<p class='dim'>Not known: this run rewrote no model.</p>"
    sizes = {"before": weights["before"] / 1e6, "after": weights["after"] / 1e6}
    if report.get("engine_bytes"):
        sizes["engine"] = report["engine_bytes"] / 1e6
    chart = svg_charts.bars(sizes, "MB", "after", "Megabytes of weights before and after")
    caption = "All constants of the model, with what stays in 16 or 32 bits."
    if carried := report.get("plugin_library_bytes"):
        caption += f" Of the engine, {decimal(carried)} are the plugin library."
    if beside := report.get("plugin_weights"):
        caption += f" Weights of plugins, {decimal(beside['bytes'])}, lie beside the engine."
    return f"<figure>{chart}<figcaption>{caption}</figcaption></figure>"


def _plan(report: Mapping[str, Any]) -> str:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for entry in sorted(report["subgraphs"], key=lambda entry: entry["decision"] == "keep"):
        shape = ", ".join(f"{key.removesuffix('_features')} {value}" for key, value in entry["shapes"].items())
        built = entry["realized"] or ("as in the model" if entry["decision"] == "keep" else "not yet")
        key = (entry["kind"], shape, entry["decision"], built, entry["kernels"], entry["activations"], entry["reason"])
        groups.setdefault(key, []).append(entry)
    rows = []
    for (kind, shape, decision, built, kernels, activations, reason), entries in groups.items():
        names = ", ".join(entry["name"] for entry in entries[:2])
        more = f" and {len(entries) - 2} more" if len(entries) > 2 else ""
        tone = "bad" if built == "missing" else "dim" if decision == "keep" or built == "not yet" else "good"
        rows.append(
            [
                escape(names + more),
                str(len(entries)),
                escape(kind),
                escape(shape),
                escape(decision),
                f'<span class="{tone}">{escape(built)}</span>',
                f'<span class="warn">{escape(kernels)}</span>' if kernels.startswith("generic") else escape(kernels),
                escape(activations),
                escape(reason),
            ]
        )
    headings = ["subgraphs", "count", "kind", "shape", "decision", "built", "kernels", "activations", "reason"]
    table = _table(headings, rows, "Plan", ["name", "n", "", "", "", "", "", "", "reason"])
    unplanned = build_report.unplanned_line(report)
    return table + (f"<p class='dim'>Not in the plan: {escape(unplanned)} stay as they are.</p>" if unplanned else "")


def _next_steps(report: Mapping[str, Any], bench: Mapping[str, Any] | None, name: str) -> str:
    """Advice that follows from what is in the report."""
    subgraphs = report["subgraphs"]
    steps = []
    if any(entry["reason_code"] == ReasonCode.NO_CALIBRATION for entry in subgraphs):
        steps.append("Give input samples with <code>--calib-data</code>: activations can then be 4 bits too (W4A4).")
    if any(entry["activations"] == FP8_PLUGIN.activations[1] for entry in subgraphs):
        steps.append(
            "Give input samples with <code>--calib-data</code>: FP8 then need not find scales of activations at run "
            "time, which takes a matrix product more."
        )
    if any(entry["reason_code"] == ReasonCode.FASTER_IN_FP8 for entry in subgraphs):
        steps.append(
            "FP8 was chosen for the tokens of the typical shapes. For an engine that decodes, give its tokens with "
            "<code>--opt-shapes</code>, or <code>--precision nvfp4</code>: NVFP4 weights are half as large."
        )
    if kept := sum(build_report.not_asked_for(entry) for entry in subgraphs):
        steps.append(
            f"{kept} linears outside of MLPs stay as they are; <code>{build_report.LINEARS_TOO}</code> replaces those "
            "that can be."
        )
    rows = report.get("accuracy", {}).get("tensors", [])
    outputs = [row for row in rows if row["kind"] == "output" and not row["discrete"]]
    if outputs and (worst := min(outputs, key=_decibels)) and _decibels(worst) < LOW_SQNR_DB:
        steps.append(
            f"Output <code>{escape(worst['name'])}</code> is at {_decibels(worst):.1f} dB: state what you need with "
            "<code>--accuracy-budget</code>, which measures each subgraph alone and mixes precisions; or set decisions "
            f"to fp8 in <code>{escape(name)}.plan.yaml</code> and hand that back with <code>--plan</code>."
        )
    if report.get("bundle"):
        steps.append("Copy the bundle to the device and run <code>python build_engine.py</code> in it.")
    if report.get("engine") and (bench is None or bench["mode"] != "engine"):
        engine = escape(Path(report["engine"]).name)
        steps.append(f"Measure on the target's GPU: <code>bench-engine {engine}</code>; this page then shows it.")
    if report.get("engine"):
        steps.append(
            f"Compare the engine itself on its GPU: <code>compare-engine {escape(Path(report['model']).name)} "
            f"{escape(Path(report['engine']).name)} --data SAMPLES --min-cosine 0.99</code>."
        )
    listed = "".join(f"<li>{step}</li>" for step in steps)
    # A line may end before an option, and not between its hyphens.
    listed = re.sub(r"--[a-z][a-z-]*", r'<span class="option">\g<0></span>', listed)
    return f"<ul>{listed}</ul>" if steps else ""


def _build(report: Mapping[str, Any]) -> str:
    rows = [[escape(key), escape(str(value))] for key, value in report["files"].items()]
    if report["timings_s"]:
        seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in report["timings_s"].items())
        rows.append(["seconds", escape(seconds)])
    rows.append(["peak memory", f"{decimal(report['peak_rss_bytes'])} resident, mapped files included"])
    for key, shapes in report["profiles"].items():
        least, typical, most = ("x".join(map(str, shape)) for shape in shapes)
        rows.append([escape(f"input {key}"), escape(f"from {least} to {most}, typically {typical}")])
    rows.append(["versions", escape(", ".join(f"{key} {value}" for key, value in report["versions"].items()))])
    rows += [['<span class="warn">warning</span>', escape(warning)] for warning in report["warnings"]]
    return _table(["what", "is"], rows, "The build", ["", "name"])
