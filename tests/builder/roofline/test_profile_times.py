"""Plans, summaries and pages of decoders say what a prefill and a decode step cost at least, product by product."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.model.decoder_contract import LOGIT_TOKENS
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html
from trt_nvfp4.builder.report.report import summary_table
from trt_nvfp4.builder.roofline import predict as roofline
from trt_nvfp4.builder.roofline.profile_times import profiles_line
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan

CAPACITY = 24


def said_rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def test_both_profiles_of_a_decoder_are_shown(tmp_path: Path, seed: int) -> None:
    model = TinyDecoder(np.random.default_rng(seed), CAPACITY).save(tmp_path / "tiny.onnx")
    target = find_target("rtx-blackwell")
    report = pipeline.run(pipeline.Request(model=model, target=target, output=tmp_path / "o.engine", stop_after="plan"))
    plan = Plan.load(tmp_path / "o.plan.yaml")
    decode, prefill = report.predicted["subgraphs"], report.predicted["prefill"]
    # A prompt fills the caches; the head sees each sequence's last tokens only.
    assert {entry["tokens"] for entry in decode} == {1}
    assert {entry["tokens"] for entry in prefill} == {CAPACITY, LOGIT_TOKENS}
    linears = [entry for entry in plan.subgraphs if entry.kind == "linear" and entry.decision != "keep"]
    assert linears
    for entry in linears:
        (rows,) = (found["tokens"] for found in prefill if found["names"] == [entry.name])
        times = [
            roofline.subgraph_cost(
                entry.kind, entry.shapes, entry.decision, count, roofline.LIMITS[target.name], entry.dtype
            )
            for count in (rows, 1)
        ]
        assert times[0].seconds > times[1].seconds or rows == 1
        said = [
            f"{name} of {said_rows(count)} at least {cost.seconds * 1e6:.3g} us, bound by {cost.bound}"
            for name, count, cost in zip(("prefill", "decode"), (rows, 1), times, strict=True)
        ]
        assert entry.kernels.endswith("; ".join(said))
        assert entry.kernels.startswith("W4A16: ")
    total = sum(entry["predicted_us"]["nvfp4"] for entry in prefill if entry["kind"] != "attention")
    line = profiles_line(report.predicted)
    assert line.startswith(f"prefill of {CAPACITY} rows {total:.3g} us, decode of 1 row ")
    shown = io.StringIO()
    Console(file=shown, width=400).print(summary_table(report))
    assert line in shown.getvalue()
    page = html.page(report, None, "o")
    assert "<h2>Prefill and decode</h2>" in page
    assert line[1:] in page


@pytest.mark.parametrize("predicted", [None, {"subgraphs": []}, {"subgraphs": [], "prefill": []}])
def test_without_predictions_there_is_no_line(predicted: dict[str, object] | None) -> None:
    assert profiles_line(predicted) == ""
