"""A model of parts for the terminal: what its parts are, what flows between them, and what building them came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.filesize import decimal
from rich.table import Table

from trt_nvfp4.builder.components.manifest import Manifest, Part, Port
from trt_nvfp4.builder.components.parts_report import PartsReport
from trt_nvfp4.builder.parallel.prediction import shown
from trt_nvfp4.builder.report.report import Report


def manifest_tables(manifest: Manifest) -> Iterator[Table]:
    """Parts and flows."""
    table = Table(title=f"{manifest.model}: {len(manifest.parts)} parts, {manifest.task}", title_justify="left")
    for heading in ("part", "takes", "gives", "runs"):
        table.add_column(heading, overflow="fold")
    for part in manifest.parts:
        table.add_row(part.name, _takes(manifest, part), _gives(part), "once" if part.loop is None else _loop(part))
    yield table


def _takes(manifest: Manifest, part: Part) -> str:
    sources = manifest.sources(part)
    lines = [
        f"{name} {port}" + (f" <- {sources[name]}" if name in sources else "")
        for name, port in part.inputs.items()
        if not name.startswith(("past_key_values.", "cross."))
    ]
    return "\n".join([*lines, *_counted(part.inputs, "past_key_values."), *_counted(part.inputs, "cross.")])


def _gives(part: Part) -> str:
    lines = [f"{name} {port}" for name, port in part.outputs.items() if not name.startswith(("present.", "cross."))]
    return "\n".join([*lines, *_counted(part.outputs, "present."), *_counted(part.outputs, "cross.")])


def _counted(ports: Mapping[str, Port], prefix: str) -> Iterator[str]:
    """One line for all layers' keys and values."""
    found = [(name, port) for name, port in ports.items() if name.startswith(prefix)]
    if found:
        yield f"{len(found)} of {prefix}*, such as {found[0][0]} {found[0][1]}"


def _loop(part: Part) -> str:
    assert part.loop is not None
    carried = ", ".join(f"{output} -> {target}" for output, target in part.loop.carry.items())
    return f"{part.loop.times} times; {carried or 'nothing carried'}"


def report_tables(report: PartsReport) -> Iterator[Table]:
    """One row per part, and how the chain compares."""
    table = Table(title="Parts", title_justify="left")
    for heading in ("part", "replaced", "weights", "engine or bundle", "predicted, least"):
        table.add_column(heading, overflow="fold")
    for name, part in report.parts.items():
        replaced = sum(entry["decision"] != "keep" for entry in part.subgraphs)
        sizes = part.weights_bytes
        weights = f"{decimal(sizes['before'])} -> {decimal(sizes['after'])}" if sizes else "-"
        engine = part.bundle or "-"
        if part.engine and part.engine_bytes is not None:
            engine = f"{part.engine} ({decimal(part.engine_bytes)})"
        table.add_row(name, f"{replaced} of {len(part.subgraphs)}", weights, engine, predicted(part))
    yield table
    rest = Table(show_header=False, box=None)
    rest.add_row("target", report.target)
    chain = report.chain
    if "export_error" in chain:
        rest.add_row("exported chain", f"relative error {chain['export_error']:.2g} against the original")
    if "cosine" in chain:
        rest.add_row("rewritten chain", f"cosine {chain['cosine']:.5f}, relative error {chain['error']:.2g}")
    if report.ranks is not None:
        rest.add_row("several GPUs", shown(report.ranks))
    rest.add_row("folder", report.folder)
    for warning in report.warnings:
        rest.add_row("warning", warning)
    yield rest


def predicted(part: Report) -> str:
    """The least time of the replaced subgraphs by the roofline; "-" where there is none."""
    entries = [] if part.predicted is None else part.predicted["subgraphs"]
    least = sum(entry["predicted_us"]["nvfp4"] for entry in entries)
    return f"{least:.0f} us" if entries else "-"
