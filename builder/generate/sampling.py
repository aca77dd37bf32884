"""How the next token is chosen from logits. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from .logits import Likeliest


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature) over the `top_k` likeliest tokens, and of
    these over the fewest whose probabilities sum to at least `top_p`.

    Before that, logits of tokens that the text has, its prompt included, are divided by `repetition_penalty` where they
    are positive and multiplied by it elsewhere, as transformers does; `presence_penalty` is subtracted from those of
    tokens that were generated, and `frequency_penalty` as often as they were.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        """Raises UsageError for values out of range, and for those that greedy decoding would ignore."""
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: expected a finite number, 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k {self.top_k}: expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: expected a number above 0, at most 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(f"--repetition-penalty {self.repetition_penalty}: expected a number above 0")
        if not abs(self.presence_penalty) < float("inf"):
            raise UsageError(f"--presence-penalty {self.presence_penalty}: expected a finite number")
        if not abs(self.frequency_penalty) < float("inf"):
            raise UsageError(f"frequency_penalty {self.frequency_penalty}: expected a finite number")
        given = {"--top-k": self.top_k, "--top-p": self.top_p, "--seed": self.seed}
        ignored = [option for option, value in given.items() if value is not None]
        if ignored and self.temperature == 0:
            raise UsageError(
                f"{ignored[0]}: greedy decoding ignores it; add --temperature 1 to sample, or leave it out"
            )


class Sampler:
    """Chooses a token per sequence. Each has random numbers of its own, so that its text does not depend on how long
    the others run."""

    def __init__(self, sampling: Sampling, batch: int) -> None:
        self._sampling = sampling
        self._random = [np.random.default_rng([sampling.seed or 0, number]) for number in range(batch)]

    @property
    def candidates(self) -> int | None:
        """How many of the likeliest tokens are chosen from; None: all."""
        if self._sampling.penalizes:
            return None
        return 1 if self._sampling.temperature == 0 else self._sampling.top_k

    def __call__(self, likeliest: Likeliest, row: int, sequence: int, text: Sequence[int], prompt: int) -> int:
        """The next token of `sequence` from a row of `likeliest`, which has `candidates` a row. `text`: its tokens so
        far, of which the first `prompt` are its prompt."""
        logits, ids = likeliest.values[row], likeliest.ids[row]
        if self._sampling.penalizes:
            logits, ids = self._penalized(logits, ids, text, prompt)
        if self._sampling.temperature == 0:
            return int(ids[0])
        return self._draw(logits.astype(np.float64), ids, self._random[sequence])

    def _penalized(
        self, logits: np.ndarray, ids: np.ndarray, text: Sequence[int], prompt: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest `top_k` logits after the penalties, and their ids, in order."""
        by_id = np.empty(len(ids), np.float64)
        by_id[ids] = logits
        seen, factor = np.unique(text), self._sampling.repetition_penalty
        seen = seen[seen < len(ids)]  # no tokens of images
        by_id[seen] = np.where(by_id[seen] > 0, by_id[seen] / factor, by_id[seen] * factor)
        generated, times = np.unique(np.array(text[prompt:], np.int64), return_counts=True)
        by_id[generated] -= self._sampling.presence_penalty + self._sampling.frequency_penalty * times
        order = np.argsort(-by_id, kind="stable")[: self._sampling.top_k]
        return by_id[order], order

    def _draw(self, logits: np.ndarray, ids: np.ndarray, random: np.random.Generator) -> int:
        # The largest is subtracted first: a small temperature would overflow.
        weights = np.exp((logits - logits[0]) / self._sampling.temperature)
        probabilities = weights / weights.sum()
        if self._sampling.top_p is not None:
            # Tokens before which less than top_p has been reached; the first always is one.
            before = np.cumsum(probabilities) - probabilities
            probabilities = np.where(before < self._sampling.top_p, probabilities, 0)
            probabilities /= probabilities.sum()
        return int(random.choice(ids, p=probabilities))
