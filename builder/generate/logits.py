"""Logits of a step, where the runner has them. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of each row, the likeliest first and of equal ones the lower id first.

    `values` (float32) and `ids` (int64) are [rows, count]. `finite` [rows] is False where any logit of the row is NaN
    or infinite.
    """

    values: np.ndarray
    ids: np.ndarray
    finite: np.ndarray


class Logits(Protocol):
    """Logits [rows, vocab]: a row for each sequence's last valid token, or for its last `count` tokens, sequence by
    sequence."""

    #: Whether a device may still compute them.
    is_pending: bool

    def host(self) -> np.ndarray:
        """All of them, in float32."""

    def likeliest(self, count: int | None) -> Likeliest:
        """The `count` largest, all for None."""

    def rows(self, numbers: Sequence[int]) -> Logits:
        """Only these rows."""


class HostLogits:
    """Logits in the host's memory."""

    is_pending = False

    def __init__(self, values: np.ndarray) -> None:
        """`values` [rows, vocab], float32."""
        self._values = values

    def host(self) -> np.ndarray:
        return self._values

    def likeliest(self, count: int | None) -> Likeliest:
        values = self._values
        ids = values.argmax(-1)[:, None] if count == 1 else np.argsort(-values, axis=-1, kind="stable")[:, :count]
        return Likeliest(np.take_along_axis(values, ids, -1), ids, np.isfinite(values).all(-1))

    def rows(self, numbers: Sequence[int]) -> HostLogits:
        return HostLogits(self._values[list(numbers)])
