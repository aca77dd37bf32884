"""JSON that is nested too deeply is an error like any other."""

from __future__ import annotations

import pytest

from trt_nvfp4.common.json_text import parse_json


def test_values() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply" if len(text) > 10 else "char"):
        parse_json(text)
