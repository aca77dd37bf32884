"""Types of values of JSON objects that anybody may have made."""

from typing import Any

import pytest

from trt_nvfp4.builder.records.json_types import misfits


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [(True, int, False), (True, float, False), (True, int | None, False), (True, bool, True), (1, bool, False)],
)
def test_true_is_no_number(value: object, kind: Any, fits: bool) -> None:
    assert (misfits({"x": value}, {"x": kind}) == []) == fits
    assert misfits({"x": value}, {"x": Any}) == []
