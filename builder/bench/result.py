"""The result of a benchmark: a file, and tables for the terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from trt_nvfp4.builder.bench.decoders import steps_table
from trt_nvfp4.builder.bench.subgraphs import TimedSubgraph
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.records.contents import Prediction
from trt_nvfp4.builder.report.charts import number
from trt_nvfp4.builder.report.html import CONTESTANTS
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import replacing

MODES = ("engine", "plugins", "roofline")
LABELS = {
    "engine": "measured: whole engines, CUDA graphs, interleaved",
    "plugins": "measured: the replaced subgraphs, one by one through the plugin host, against cuBLAS products of the "
    "same shapes (no activations or conversions between them)",
    "roofline": "predicted: the least time of the replaced subgraphs by the target's published peaks; nothing was run",
}
# For decoders, whose steps are timed.
DECODER_LABELS = {
    "engine": "measured: engines over their caches, as generate runs them, in turns",
    "roofline": "predicted: the least time by the target's published peaks; nothing was run",
}


@dataclass
class Result:
    """A benchmark's numbers. `contestants`: microseconds (p50, p90, p99, ...) of the whole; `subgraphs`: of its parts.

    `steps`: for decoders, microseconds of one sequence by contestant: for a prompt, for drafts that are verified, and
    for a token at several cached lengths. Their `contestants` are those of the longest.
    """

    mode: str
    model: str
    target: str
    label: str = ""
    contestants: dict[str, dict[str, float]] = field(default_factory=dict)
    subgraphs: Sequence[Prediction | TimedSubgraph] = field(default_factory=list)
    layers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cosine_to_bf16: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")


def check_destination(path: Path) -> None:
    """Refuse, before the work, to write a result where it cannot be, or over something else.

    Raises UsageError.
    """
    if path.is_dir():
        raise UsageError(f"-o {path}: is a folder, and a file is to be written; name one in it")
    if path.exists() and not (path.is_file() and _is_result(path)):
        raise UsageError(f"-o {path}: is not a result of bench-engine, and would be written over; choose another -o")


def _is_result(path: Path) -> bool:
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and {"mode", "contestants"} <= found.keys()


def tables(result: Result) -> list[Table]:
    """The result for the terminal."""
    if result.steps:
        return [steps_table(result.steps, f"{result.model} on {result.target}: {result.label}")]
    unit = "predicted us" if result.mode == "roofline" else "median us"
    whole = Table(title=f"{result.model}: {result.label}", title_justify="left")
    cosines = result.cosine_to_bf16  # of whole engines
    for heading in ("contestant", unit, "p90", "p99", "speed-up as planned", *(["cosine to BF16"] if cosines else [])):
        whole.add_column(heading, justify="left" if heading == "contestant" else "right")
    key = "predicted_us" if result.mode == "roofline" else "median_us"
    ours = result.contestants["nvfp4"][key]
    for name, times in result.contestants.items():
        tail = [number(times[percentile]) if percentile in times else "-" for percentile in ("p90_us", "p99_us")]
        speed_up = "-" if name == "nvfp4" else f"{times[key] / ours:.2f}x"
        cosine = [f"{cosines[name]:.5f}"] if cosines else []
        whole.add_row(CONTESTANTS[name], number(times[key]), *tail, speed_up, *cosine)
    parts = Table(title="subgraphs", title_justify="left")
    names = [name for name in result.contestants if result.subgraphs]
    for heading in ("subgraph", "tokens", "decision", *(CONTESTANTS[name] for name in names)):
        parts.add_column(heading, overflow="fold", justify="left" if heading in ("subgraph", "decision") else "right")
    for entry in result.subgraphs:
        if "predicted_us" in entry:
            times = entry["predicted_us"]
        else:
            times = {name: timing["median_us"] for name, timing in entry["timings"].items()}
        label = entry["names"][0] + (f" and {len(entry['names']) - 1} like it" if len(entry["names"]) > 1 else "")
        parts.add_row(label, str(entry["tokens"]), entry["decision"], *(number(times[name]) for name in names))
    return [whole, parts] if result.subgraphs else [whole]
