"""A build reads the model that it is given once, whatever its steps ask about it."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.pipeline import build_step, pipeline
from trt_nvfp4.builder.targets import find_target

_opened: Counter[str] = Counter()


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    """Counts files that are opened to be read, by path, but for those that transformers opens by itself."""
    if event == "open" and isinstance(arguments[0], str | os.PathLike) and "w" not in (arguments[1] or ""):
        frame = sys._getframe(1)
        if "transformers" not in frame.f_code.co_filename:
            _opened[os.path.abspath(os.fspath(arguments[0]))] += 1


sys.addaudithook(_count)  # there is no way to remove one


@pytest.mark.parametrize("goal", ["rewrite", "budget", "bundle", "surgery"])
def test_an_onnx_file_is_read_once(
    goal: str, gated_mlps: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gated_mlps.parent
    (folder / "samples").mkdir()
    np.save(folder / "samples" / "x.npy", rng.standard_normal((8, 64)).astype(np.float16))
    (folder / "script.py").write_text("def surgery(graph):\n    return graph\n")
    monkeypatch.setattr(build_step, "_plugins", lambda *_: (None, False))
    request = pipeline.Request(
        gated_mlps,
        find_target("rtx-blackwell"),
        output=None if goal == "bundle" else folder / "out.engine",
        bundle=folder / "bundle" if goal == "bundle" else None,
        stop_after=None if goal == "bundle" else "rewrite",
        calib_data=folder / "samples",
        surgery=folder / "script.py" if goal == "surgery" else None,
        accuracy_budget=Budget.parse("cosine>=0.9") if goal == "budget" else None,
    )
    _opened.clear()
    report = pipeline.run(request)
    assert report.accuracy["samples"]
    assert _opened[str(gated_mlps)] == 1, _opened
    # A bundle takes its weights over, and its file is written again.
    assert _opened[report.files["rewritten model"]] <= (2 if goal == "bundle" else 1), _opened


@pytest.mark.slow
def test_a_directory_is_read_once(tmp_path: Path, seed: int) -> None:
    small_decoders = pytest.importorskip("onnx_models.small_decoders")
    small_decoders.saved("llama", tmp_path / "m", seed)
    request = pipeline.Request(
        tmp_path / "m", find_target("h200"), output=tmp_path / "o.engine", stop_after="rewrite", cache_capacity=32
    )
    _opened.clear()
    pipeline.run(request)
    assert _opened[str(tmp_path / "m" / "config.json")] <= 1, _opened
    assert sum(count for path, count in _opened.items() if path.endswith("/o.onnx")) <= 2, _opened
