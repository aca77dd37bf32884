"""bench-engine of language models: predictions by hand, and steps timed on runners."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from command_lines import invoked
from rich.console import Console

from onnx_models.tiny_decoder import HEAD_DIM, HIDDEN, KV_HEADS, VOCAB, TinyDecoder
from trt_nvfp4.builder.bench.decoders import Lengths, lengths_of, steps_table, time_steps
from trt_nvfp4.builder.cli.bench_engine import app
from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.roofline.predict import LIMITS

CAPACITY = 64


@pytest.fixture
def model(tmp_path: Path, seed: int) -> Path:
    return TinyDecoder(np.random.default_rng(seed), CAPACITY).save(tmp_path / "model.onnx")


def test_a_prediction_reads_weights_once_and_caches(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.bench.json"
    ran = invoked(app, [model, "--target", "rtx-blackwell", "--mode", "roofline", "-o", out])
    found = json.loads(out.read_text())
    assert "predicted" in found["label"]
    assert "nothing was run" in " ".join(ran.stdout.split())
    assert [(step["phase"], step["tokens"]) for step in found["steps"]] == [
        ("prompt", 32),
        ("step", 8),
        ("step", 32),
        ("step", 64),
    ]
    # BF16 by hand: products with what they read and write, one after the other, and whole caches.
    limits = LIMITS["rtx-blackwell"]
    heads, kv = 32, KV_HEADS * HEAD_DIM
    sizes = [(HIDDEN, heads), (HIDDEN, kv), (HIDDEN, kv), (heads, HIDDEN), (HIDDEN, VOCAB)]
    least = 2 * sum(k * n for k, n in sizes) + 2 * 2 * kv * CAPACITY
    for step in found["steps"][1:]:
        us = step["us"]
        assert us["nvfp4"] < us["fp8"] < us["bf16"]
        assert least <= us["bf16"] * 1e-6 * limits.bandwidth <= 1.5 * least
    assert found["contestants"]["bf16"]["predicted_us"] == found["steps"][-1]["us"]["bf16"]


def test_runners_take_turns_and_are_timed_at_every_length(model: Path) -> None:
    runners: dict[str, Any] = {name: OnnxRunner(model) for name in ("nvfp4", "bf16")}
    seen: list[tuple[str, int, int]] = []
    now = [0.0]

    def noted(name: str, step: Any, seconds: float) -> Any:
        def run(ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int) -> Any:
            seen.append((name, ids.shape[1], int(past[0])))
            now[0] += seconds
            logits = step(ids, past, new, count)
            assert len(logits.host()) == count
            return logits

        return run

    for name, runner in runners.items():
        runner.step = noted(name, runner.step, 1.0 if name == "nvfp4" else 3.0)
    steps = time_steps(runners, Lengths(10, (5, CAPACITY)), rounds=2, warm_up=1, clock=lambda: now[0])
    assert seen[:4] == [("nvfp4", 10, 0), ("bf16", 10, 0)] * 2
    assert seen[6:8] == [("nvfp4", 1, 4), ("bf16", 1, 4)]
    assert seen[-1] == ("bf16", 1, CAPACITY - 1)
    assert [step["us"] for step in steps] == [{"nvfp4": 1e6, "bf16": 3e6}] * 3
    assert [step["tokens"] for step in steps] == [10, 5, CAPACITY]
    console = Console(width=80, record=True)
    console.print(steps_table(steps, "a title"))
    assert "(3.00x)" in console.export_text()
    lengths = Lengths(10, (5, CAPACITY), accepted=2.5, verified=(4, 8))
    steps = time_steps(runners, lengths, rounds=2, warm_up=0, clock=lambda: now[0])
    assert ("nvfp4", 8, CAPACITY - 8) in seen
    assert [(step["phase"], step["tokens"], step.get("new")) for step in steps] == [
        ("prompt", 10, None),
        ("verify", CAPACITY, 4),
        ("verify", CAPACITY, 8),
        ("step", 5, None),
        ("step", CAPACITY, None),
    ]
    assert steps[1]["tokens_per_s"] == {"nvfp4": 2.5, "bf16": 2.5 / 3}


def test_a_prediction_at_stated_acceptance(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):  # in a pipe, no cell of a table is wrapped
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "r.bench.json"
    ran = invoked(
        app, [model, "--target", "rtx-blackwell", "--mode", "roofline", "--accepted", 2.5, "--lengths", 32, "-o", out]
    )
    _, *verified, step = json.loads(out.read_text())["steps"]
    assert [row["new"] for row in verified] == [4, 8, 16]
    least = step["us"]["nvfp4"]
    for row in verified:
        assert row["us"]["nvfp4"] >= least
        assert row["tokens_per_s"]["nvfp4"] == pytest.approx(2.5e6 / row["us"]["nvfp4"])
    assert "4 tokens with drafts, cached: 32" in " ".join(ran.stdout.split())


def test_lengths(model: Path) -> None:
    decoder = OnnxRunner(model).decoder
    assert lengths_of(decoder) == Lengths(32, (8, 32, 64))
    assert lengths_of(decoder, [3]).cached == (3,)
    assert lengths_of(decoder, [3], 1.5).verified == (2,)
    with pytest.raises(BuilderError, match=r"--accepted 2.5: a step verifies at most 2 tokens here"):
        lengths_of(decoder, [2], 2.5)
    for asked in ([0], [65]):
        with pytest.raises(BuilderError, match="the caches hold 1 to 64 tokens"):
            lengths_of(decoder, asked)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [("65", "--lengths 65: the caches hold 1 to 64"), ("4,x", "--lengths 4,x: expected whole numbers")],
)
def test_bad_lengths_are_one_message(model: Path, lengths: str, words: str) -> None:
    ran = CliRunner().invoke(app, [str(model), "--target", "thor", "--lengths", lengths])
    assert (ran.exit_code, ran.stderr.count("error: ")) == (USAGE, 1)
    assert words in " ".join(ran.stderr.split())


def test_lengths_are_for_language_models(gated_mlps: Path) -> None:
    invoked(app, [gated_mlps, "--target", "thor", "--lengths", "4"], USAGE, "is not a language model with caches")
