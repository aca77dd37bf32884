"""Bytes that a decoder reads per generated token, against a count by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from onnx_models.tiny_decoder import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, TinyDecoder
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html
from trt_nvfp4.builder.report.report import Report, summary_table, token_line
from trt_nvfp4.builder.roofline import predict as roofline
from trt_nvfp4.builder.roofline.token_bytes import OTHERS
from trt_nvfp4.builder.targets import find_target

CAPACITY = 24
ATTENTION = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
HEAD = HIDDEN * VOCAB


def planned(path: Path, seed: int, **options: object) -> Report:
    model = TinyDecoder(np.random.default_rng(seed), CAPACITY).save(path / "tiny.onnx")
    request = pipeline.Request(
        model=model,
        target=find_target("rtx-blackwell"),
        output=path / "o.engine",
        stop_after="plan",
        **options,  # type: ignore[arg-type]
    )
    return pipeline.run(request)


def test_everything_in_nvfp4(tmp_path: Path, seed: int) -> None:
    report = planned(tmp_path, seed, activations="keep")
    found = report.token_bytes
    assert found["quantized"] == {"nvfp4_w4a16": (ATTENTION + HEAD) * 0.5625}
    caches = 2 * KV_HEADS * HEAD_DIM * CAPACITY * 4
    rows = 2 * HIDDEN * 4  # of the embedding, and of the positions
    assert (found["cache_tokens"], found["cache_bytes"]) == (CAPACITY, caches)
    assert rows <= found["kept"].pop(OTHERS) < rows + 64  # a few scalars, too
    assert found["kept"] == {}
    assert math.isclose(found["at_most"], roofline.LIMITS["rtx-blackwell"].bandwidth / found["total"])
    assert found["total"] == pytest.approx((ATTENTION + HEAD) * 0.5625 + caches + rows, abs=64)


def test_what_is_kept_is_listed_by_name(tmp_path: Path, seed: int) -> None:
    report = planned(tmp_path, seed, activations="keep", kinds=("linear",), include="^linear_0$")
    linears = [entry for entry in report.subgraphs if entry["kind"] == "linear"]
    kept = [entry["name"] for entry in linears if entry["decision"] == "keep"]
    assert kept
    found = report.token_bytes
    assert set(kept) < set(found["kept"])
    sizes = {entry["name"]: math.prod(entry["shapes"].values()) for entry in linears}
    assert {name: found["kept"][name] for name in kept} == {name: 4 * sizes[name] for name in kept}
    assert list(found["kept"].values()) == sorted(found["kept"].values(), reverse=True)
    assert kept[0] in html.page(report, None, "o")


def test_it_is_said(tmp_path: Path, seed: int) -> None:
    report = planned(tmp_path, seed)
    assert "tokens/s by the bandwidth of RTX PRO 6000" in token_line(report)
    assert "read per token" in summary_table(report).columns[0]._cells
    assert "Read for each generated token" in html.page(report, None, "o")
    report.token_bytes = None
    assert token_line(report) == ""
