"""How the next token is chosen from logits. Needs NumPy alone: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import USAGE, BuilderError
from .logits import Likeliest


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature) over the `top_k` likeliest tokens, and of
    these over the fewest whose probabilities sum to at least `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises BuilderError (usage) for values out of range, and for those that greedy decoding would ignore."""
        if not 0 <= self.temperature < float("inf"):
            raise BuilderError(USAGE, f"--temperature {self.temperature}: expected a finite number, 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise BuilderError(USAGE, f"--top-k {self.top_k}: expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BuilderError(USAGE, f"--top-p {self.top_p}: expected a number above 0, at most 1")
        given = {"--top-k": self.top_k, "--top-p": self.top_p, "--seed": self.seed}
        ignored = [option for option, value in given.items() if value is not None]
        if ignored and self.temperature == 0:
            raise BuilderError(
                USAGE, f"{ignored[0]}: greedy decoding ignores it; add --temperature 1 to sample, or leave it out"
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
        return 1 if self._sampling.temperature == 0 else self._sampling.top_k

    def __call__(self, likeliest: Likeliest, sequences: Sequence[int]) -> list[int]:
        """Next tokens of `sequences`, rows of `likeliest`, which has `candidates` a row."""
        if self._sampling.temperature == 0:
            return [int(likeliest.ids[number, 0]) for number in sequences]
        return [
            self._draw(likeliest.values[number].astype(np.float64), likeliest.ids[number], self._random[number])
            for number in sequences
        ]

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
