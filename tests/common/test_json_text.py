"""JSON that is nested too deeply, and files without an end, are errors like any other."""

import os
from pathlib import Path

import numpy as np
import pytest

from trt_nvfp4.common import json_text
from trt_nvfp4.common.json_text import parse_json, read_json, read_npz, read_text


def test_values() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply" if len(text) > 10 else "char"):
        parse_json(text)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "\N{SNOWMAN}"}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": "\N{SNOWMAN}"}
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(tmp_path / "a.json")


def test_files_that_are_larger_than_any_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "_MOST", 1 << 20)
    (tmp_path / "a.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not an ordinary file"):
        read_text(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[" + " " * (1 << 20))
    with pytest.raises(ValueError, match="larger than 1 MB"):
        read_json(tmp_path / "b.json")


def test_arrays_come_back(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = {"a": rng.standard_normal((3, 4)), "b": rng.integers(0, 9, 5)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = read_npz(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_other_files(tmp_path: Path, rng: np.random.Generator) -> None:
    file = tmp_path / "a.npz"
    np.savez_compressed(file, a=rng.standard_normal((30, 40)))
    whole = file.read_bytes()
    np.save(tmp_path / "one.npy", rng.standard_normal(3))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    for broken in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:60] + whole[70:],
        whole.replace(whole[60:64], b"abcd"),
    ):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"."):
            read_npz(file)
    for name in ("one.npy", "objects.npz"):
        with pytest.raises(ValueError, match=r"."):
            read_npz(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not an ordinary file"):
        read_npz(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such file"):
        read_npz(tmp_path / "none.npz")


def test_arrays_larger_than_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 20, np.int8))
    with pytest.raises(ValueError, match="MB are free"):
        read_npz(tmp_path / "a.npz", copies=1 << 30)
