"""The interface of runners of a decoder's steps. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..model.decoder_contract import Decoder
from .logits import Logits


class Runner(Protocol):
    """A decoder with its caches on some device. `name` says where it runs, for messages."""

    name: str
    decoder: Decoder
    #: Most tokens per sequence that one step takes.
    longest_step: int

    def start(self, batch: int) -> None:
        """Empty caches for so many sequences."""

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> Logits:
        """Append `new` [batch] of `ids` [batch, tokens] (int64, padded on the right) at `past` [batch]; returns logits
        [batch * count, vocab] of each sequence's last `count` valid tokens, at most the decoder's `logit_tokens`. A
        sequence with fewer valid tokens has others in front. `previous`, float32 [batch, tokens, hidden_size]: the
        hidden states that a head takes."""

    def hidden(self) -> np.ndarray:
        """The hidden states of the last step's tokens, float32 [batch, tokens or more, hidden_size], of a decoder that
        gives them out."""

    def save_states(self) -> None:
        """Keep a copy of all recurrent states, in place of the one before."""

    def restore_states(self, rows: Sequence[int]) -> None:
        """Put the copied states of these rows back."""

    def close(self) -> None:
        """Free what it holds."""


class SlotRunner(Runner, Protocol):
    """A runner whose sequences begin and end one by one: each row of the batch is a slot."""

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Logits:
        """As `step`, of one row: `ids` [1, tokens]. The others stay as they are, and cost nothing."""

    def clear_row(self, row: int) -> None:
        """Zero the row's caches and states, as before a first token. Caches need it only where they hold NaN."""

    def copy_row(self, source: int, target: int) -> None:
        """Copy all caches and states of one row to another."""


@runtime_checkable
class DraftRunner(SlotRunner, Protocol):
    """A runner that drafts several tokens while the host waits once."""

    def drafts_for(self, model: Runner) -> bool:
        """Whether it can: a head reads the hidden states of `model` where that keeps them."""

    def draft(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int, model: Runner) -> np.ndarray:
        """Append tokens as `step` does, and count - 1 times the likeliest one behind; returns the likeliest ones, int64
        [batch, count], of at most LOGIT_TOKENS. A head takes the hidden states of `model` at the same positions, and
        behind the new tokens its own."""
