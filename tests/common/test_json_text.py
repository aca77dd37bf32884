"""JSON that is nested too deeply, and files without an end, are errors like any other."""

from pathlib import Path

import pytest

from trt_nvfp4.common import json_text
from trt_nvfp4.common.json_text import parse_json, read_json, read_text


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
