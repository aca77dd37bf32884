"""The page of a build: what it holds, and how a browser shows it."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html as html_report
from trt_nvfp4.builder.report.report import load
from trt_nvfp4.builder.targets import find_target


@pytest.fixture
def report(gated_mlps: Path, rng: np.random.Generator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run as far as the rewritten model, with samples; made once, since the seed is the same for all."""
    made, out = tmp_path_factory.getbasetemp() / "report", gated_mlps.parent / "out"
    if not made.exists():
        (samples := gated_mlps.parent / "samples").mkdir()
        np.savez(samples / "0.npz", x=rng.standard_normal((5, 64)).astype(np.float16))
        target = find_target("rtx-blackwell")
        pipeline.run(pipeline.Request(gated_mlps, target, out / "o.engine", calib_data=samples, stop_after="rewrite"))
        shutil.copytree(out, made)
    shutil.copytree(made, out, dirs_exist_ok=True)
    return out / "o.report.json"


BUDGET = {
    "budget": "cosine>=0.9",
    "metric": "cosine",
    "achieved": 0.95,
    "worst_output": "y",
    "held_out_samples": 2,
    "choosing_samples": 3,
    "predicted_loss": 0.01,
    "roofline_us": 2.5,
    "subgraphs": {
        "mlp": [{"decision": "fp8", "seconds": 2.5e-6, "loss": 0.01, "value": 0.9876, "op": "", "worst_output": "y"}]
    },
    "tried": [{"roofline_us": 2.5, "achieved": 0.95}],
}


def page_of(report: Path, data: dict[str, Any], name: str = "o") -> str:
    """The page of a report that holds `data`, without a benchmark."""
    report.write_text(json.dumps(data))
    return html_report.page(load(report), None, name)


class Page(HTMLParser):
    """Checks that tags close in order; keeps text, tables and whatever would be loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_says_what_the_report_says(report: Path) -> None:
    data = json.loads(report.read_text())
    page = Page(report.with_name("o.report.html").read_text())
    text = " ".join(page.text)
    for section in ("Speed against baselines", "Accuracy by layer", "Roofline", "Size of the weights", "The build"):
        assert section in text
    for entry in data["subgraphs"]:
        assert entry["name"] in text
        assert entry["reason"] in text
    assert "Predicted, nothing was run" in text
    assert f"{sum(entry['predicted_us']['bf16'] for entry in data['predicted']['subgraphs']):.3g} us" in text
    for row in data["accuracy"]["tensors"]:
        assert f"{row['cosine']:.6f}" in text
    assert "no engine built yet" in text
    weights = data["weights_bytes"]
    assert f"{weights['before'] / weights['after']:.2f}x smaller" in text


def test_page_says_how_it_was_made_and_is_run(report: Path) -> None:
    data = json.loads(report.read_text())
    engine = str(report.with_name("o.engine"))
    data |= {
        "command": "build-engine 'a <b>.onnx' -o o.engine",
        "date": "2026-11-28T12:00:00+00:00",
        "warnings": ["a scale is <missing>"],
        "engine": engine,
        "engine_bytes": 5,
        "engine_sha256": "0123abcd",
        "backend": "tensorrt_rtx 1.7",
        "files": {"plan": str(report.with_name("o.plan.yaml")), "page": str(report.with_name("o.report.html"))},
        "budget": BUDGET,
    }
    report.write_text(json.dumps(data))
    page = Page(html_report.write(report).read_text())
    text = " ".join(page.text)
    for shown in ("build-engine 'a <b>.onnx'", "2026-11-28T12:00", "a scale is <missing>", "0123abcd", "0.9876", "2.5"):
        assert shown in text, shown
    for name, line in {**data["inputs"], **data["outputs"]}.items():
        assert name in text
        assert line in text
    smallest, _, largest = next(iter(data["profiles"].values()))
    assert f"{'x'.join(map(str, smallest))} to {'x'.join(map(str, largest))}" in text
    assert text.index("a scale is <missing>") < text.index("Accuracy by layer") < text.index("Speed against")
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == ["o.plan.yaml"]
    (snippet,) = [part for part in page.text if "deserialize_cuda_engine" in part]
    compile(snippet, "snippet", "exec")
    assert "tensorrt_rtx as trt" in snippet
    assert f"bench-engine {engine}" in " ".join(text.split())


def _built(report: Path, **more: Any) -> Page:
    """The page of a report with an engine and `more`."""
    data = json.loads(report.read_text())
    built = {"engine": str(report.with_name("o.engine")), "engine_bytes": 5, "backend": "tensorrt 10.13"}
    report.write_text(json.dumps({**data, **built, **more}))
    return Page(html_report.write(report).read_text())


def _snippets(page: Page) -> list[str]:
    return [part for part in page.text if "deserialize_cuda_engine" in part]


def test_the_snippet_loads_the_library_that_lies_beside_the_engine(report: Path) -> None:
    (embedded,) = _snippets(_built(report))
    assert "engine_host_code_allowed = True" in embedded
    (beside,) = _snippets(_built(report, plugin_library="lib.so"))
    compile(beside, "snippet", "exec")
    assert "load_library('lib.so')" in beside
    assert "engine_host_code_allowed" not in beside


@pytest.mark.parametrize("refused", ["set_input_shape", "execute_async_v3"])
def test_the_snippet_says_what_tensorrt_refuses(report: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch and TensorRT, which refuse this call."""
    (snippet,) = _snippets(_built(report))
    tensorrt, stand_in = MagicMock(), MagicMock()
    engine = tensorrt.Runtime.return_value.deserialize_cuda_engine.return_value
    engine.num_io_tensors = 0
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    monkeypatch.chdir(report.parent)
    report.with_name("o.engine").write_bytes(b"engine")
    exec(snippet, {})
    getattr(engine.create_execution_context.return_value, refused).return_value = False
    with pytest.raises(RuntimeError, match="the engine"):
        exec(snippet, {})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"plugin_weights": {"file": "w.safetensors", "digest": "0", "bytes": 8, "tensors": 1}}, "in a file beside it"),
        ({"caches_in_place": 2}, "generate"),
        ({"shape_values": {"size": [[1], [2], [3]]}}, "The values of size are shapes"),
    ],
)
def test_an_engine_that_takes_more_has_no_snippet(report: Path, more: dict[str, Any], said: str) -> None:
    page = _built(report, **more)
    assert not _snippets(page)
    text = " ".join("".join(page.text).split())
    assert said in text
    assert "docs/how_to/running.md" in text


def test_points_lie_on_the_roofline(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float, float]] = []
    monkeypatch.setattr(html_report.svg_charts, "roofline", lambda _, __, points, ___: drawn.extend(points) or "")
    html_report.write(report)
    limits = json.loads(report.read_text())["predicted"]
    for _, intensity, operations in drawn:
        assert operations == pytest.approx(min(limits["bandwidth"] * intensity, limits["tflops"]["fp4"] * 1e12))
    assert drawn


def test_agreement_that_no_decibels_tell(report: Path) -> None:
    """JSON has no infinity: of equal tensors there is none, nor of those that are not finite."""
    data = json.loads(report.read_text())
    for row, largest in zip(data["accuracy"]["tensors"], (0.0, None, 1.0), strict=True):
        row |= {"sqnr_db": None, "max_abs": largest}
    report.write_text(json.dumps(data))
    rows = re.findall(r"<tr>(.*?)</tr>", html_report.write(report).read_text())
    shown = {row["name"]: "equal" if row["max_abs"] == 0 else "none" for row in data["accuracy"]["tensors"]}
    for name, text in shown.items():
        (cells,) = [row for row in rows if f">{name}</td>" in row and "%" in row]
        assert f">{text}</td>" in cells


def test_page_needs_nothing_from_elsewhere(report: Path) -> None:
    page = Page(report.with_name("o.report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    named = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert set(named) <= {file.name for file in report.parent.iterdir()}, "links to files beside the page alone"
    assert "url(" not in " ".join(page.text)


def test_tables_and_charts_are_accessible(report: Path) -> None:
    page = Page(report.with_name("o.report.html").read_text())
    assert all(attributes.get("scope") == "col" for tag, attributes in page.tags if tag == "th")
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) == 4
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert dict(page.tags)["html"] == {"lang": "en"}


def test_measured_times_take_the_place_of_predicted_ones(report: Path) -> None:
    bench = {
        "mode": "engine",
        "label": "measured: whole engines",
        "target": "rtx-blackwell",
        "contestants": {"nvfp4": {"median_us": 123.4}, "fp8": {"median_us": 234.5}, "bf16": {"median_us": 345.6}},
        "environment": {"before": {"gpu": "RTX PRO 6000"}},
        "notes": ["TensorRT's own NVFP4 is not realized: why"],
    }
    report.with_name("o.bench.json").write_text(json.dumps(bench))
    text = html_report.write(report).read_text()
    assert "measured: whole engines (RTX PRO 6000). TensorRT&#39;s own NVFP4 is not realized: why" in text
    assert "123 us" in text
    assert "Predicted, nothing was run" not in text


def test_times_of_an_earlier_build_are_not_shown(report: Path) -> None:
    bench = report.with_name("o.bench.json")
    bench.write_text("of an earlier build, and not even JSON")
    os.utime(bench, ns=(0, report.stat().st_mtime_ns - 1))
    assert "Predicted, nothing was run" in html_report.write(report).read_text()


def test_page_of_no_report(report: Path) -> None:
    report.write_text("{}")
    with pytest.raises(BuilderError, match="not a report of build-engine"):
        html_report.write(report)


def test_subgraphs_of_different_tokens(report: Path) -> None:
    data: dict[str, Any] = json.loads(report.read_text())
    assert "at its published peaks, 128 tokens, of " in page_of(report, data)
    data["predicted"]["subgraphs"][0]["tokens"] = 7
    assert "at its published peaks, 7 to 128 tokens, of " in page_of(report, data)


def test_names_are_escaped(report: Path) -> None:
    assert "<i>o" not in page_of(report, json.loads(report.read_text()), "<i>o</i>")


def test_advice_is_of_outputs_that_a_budget_counts(report: Path) -> None:
    """An SQNR of indices says nothing, and --accuracy-budget leaves them out."""
    data: dict[str, Any] = json.loads(report.read_text())
    (output,) = [row for row in data["accuracy"]["tensors"] if row["kind"] == "output"]
    output["sqnr_db"] = 5.0
    assert f"Output <code>{output['name']}</code> is at 5.0 dB" in page_of(report, data)
    output["discrete"] = True
    assert "--accuracy-budget" not in page_of(report, data)


def test_every_stage_has_a_page(gated_mlps: Path) -> None:
    output = gated_mlps.parent / "out" / "o.engine"
    pipeline.run(pipeline.Request(gated_mlps, find_target("h200"), output, stop_after="plan"))
    text = " ".join(Page(output.with_suffix(".report.html").read_text()).text)
    assert "Not measured" in text
    assert "--calib-data" in text
    assert "--opt-shapes" in text  # they have 128 tokens


def test_run_that_went_on_from_a_rewritten_model(report: Path) -> None:
    """It has neither the sizes before nor the samples, and its model was rewritten."""
    data = json.loads(report.read_text()) | {"weights_bytes": {}, "accuracy": {}}
    text = " ".join(Page(page_of(report, data)).text)
    assert "Not known: this run rewrote no model." in text
    assert "Not measured: this run rewrote no model." in text


PAYLOAD = "<script>'\"&"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all texts, numbers and keys."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if path:
        yield path
    for key, entry in entries:
        yield from places(entry, (*path, key))


def with_payload(data: Any, path: tuple[Any, ...], as_key: bool) -> Any:
    data = json.loads(json.dumps(data))
    at = data
    for key in path[:-1]:
        at = at[key]
    if not as_key:
        at[path[-1]] = PAYLOAD
    elif isinstance(at, dict):
        at[PAYLOAD] = at.pop(path[-1])
    return data


def test_nothing_in_a_report_becomes_html(report: Path) -> None:
    """Whichever value or key is replaced: the page shows it as text, or there is none, with a message."""
    beside = report.with_name("o.bench.json")
    found = json.loads(report.read_text())
    found |= {"budget": BUDGET}
    bench = {
        "mode": "engine",
        "target": "ada",
        "label": "measured",
        "notes": ["a note"],
        "contestants": {"nvfp4": {"median_us": 1.0}, "fp8": {"median_us": 2.0}},
        "environment": {"before": {"gpu": "a GPU"}},
    }
    pages = 0
    for data, other in ((found, bench), (bench, found)):
        for path in places(data):
            for as_key in (False, True):
                changed = with_payload(data, path, as_key)
                built, measured = (changed, other) if data is found else (other, changed)
                report.write_text(json.dumps(built))
                beside.write_text(json.dumps(measured))
                os.utime(report, (0, 0))
                try:
                    text = html_report.write(report).read_text()
                except BuilderError as error:
                    assert error.exit_code == errors.USAGE  # noqa: PT017
                    continue
                pages += 1
                assert "<script" not in text, (path, as_key)
                assert "'\"&" not in text, (path, as_key)
    assert pages > 100
