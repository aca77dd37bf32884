"""Of many cases that are alike: which run with the fast tests, which with the slow ones, and which only nightly."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], quick: Collection[Any] = (), slow: Collection[Any] = ()) -> list[Any]:
    """The cases as parameters: those neither quick nor slow are nightly."""
    marks = {True: [pytest.mark.slow], False: [pytest.mark.slow, pytest.mark.nightly]}
    return [case if case in quick else pytest.param(case, marks=marks[case in slow]) for case in cases]
