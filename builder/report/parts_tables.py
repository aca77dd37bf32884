"""A model of parts for the terminal: what its parts are, what flows between them, and what building them came to."""

import re
from collections.abc import Iterable, Iterator, Mapping

from rich.filesize import decimal
from rich.table import Table

from trt_nvfp4.builder.components.manifest import Loop, Manifest, Part, Port
from trt_nvfp4.builder.parallel.prediction import shown
from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.common.cache_names import is_past, is_present


def manifest_tables(manifest: Manifest) -> Iterator[Table]:
    """The flows between parts, and the parts."""
    drawing = Table(title="What flows", title_justify="left", show_header=False, box=None)
    for source, names, target in arrows(manifest):
        drawing.add_row(source, f"── {_grouped(names)} ──▶", target)
    yield drawing
    table = Table(title=f"{manifest.model}: {len(manifest.parts)} parts, {manifest.task}", title_justify="left")
    for heading in ("part", "takes", "gives", "runs"):
        table.add_column(heading, overflow="fold")
    for part in manifest.parts:
        takes, gives = _ports(part.inputs, manifest.sources(part)), _ports(part.outputs, {})
        table.add_row(part.name, takes, gives, "once" if part.loop is None else _loop(part))
    yield table


def arrows(manifest: Manifest) -> Iterator[tuple[str, list[str], str]]:
    """(from, tensors, to) in the order in which the parts run: what is given, what flows, what goes into a part's own
    next turn, and what comes out in the end."""
    for part in manifest.parts:
        sources, loop = manifest.sources(part), part.loop or Loop(1)
        caches = [name for name in part.inputs if is_past(name)]
        elsewhere = {*sources, *caches, *loop.values}
        if given := [name for name in part.inputs if name not in elsewhere]:
            yield "given", given, part.name
        for origin in dict.fromkeys(source.partition(".")[0] for source in sources.values()):
            yield origin, [name for name, source in sources.items() if source.startswith(f"{origin}.")], part.name
        if caches:
            yield part.name, caches, f"{part.name}, next step"
        if loop.carry:
            yield part.name, list(loop.carry), f"{part.name}, {loop.times} times"
    results = manifest.results()
    for part in manifest.parts:
        own = [name for name in part.outputs if f"{part.name}.{name}" in results]
        if ends := [name for name in own if not is_present(name)]:
            yield part.name, ends, "result"


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _grouped(names: Iterable[str]) -> str:
    """The names, those of several layers as one."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_numberless(name), []).append(name)
    return ", ".join(alike[0] if len(alike) == 1 else f"{name} ({len(alike)})" for name, alike in found.items())


def _ports(ports: Mapping[str, Port], sources: Mapping[str, str]) -> str:
    """A line for each tensor, or for those of several layers."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, port in ports.items():
        origin = f" <- {sources[name]}" if name in sources else ""
        found.setdefault((_numberless(name), str(port), _numberless(origin)), []).append(f"{name} {port}{origin}")
    return "\n".join(
        alike[0] if len(alike) == 1 else f"{name} {port}{origin} ({len(alike)})"
        for (name, port, origin), alike in found.items()
    )


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
    if report.joints:
        rest.add_row("actions' errors", ", ".join(f"{name} {error:.2g}" for name, error in report.joints.items()))
    if report.ranks is not None:
        rest.add_row("several GPUs", shown(report.ranks))
    rest.add_row("folder", report.folder)
    for warning in report.warnings:
        rest.add_row("warning", warning)
    yield rest


def predicted(part: Report) -> str:
    """The least time of the replaced subgraphs by the roofline; "-" without a prediction."""
    entries = [] if part.predicted is None else part.predicted["subgraphs"]
    least = sum(entry["predicted_us"]["nvfp4"] for entry in entries)
    return f"{least:.3g} us" if entries else "-"
