"""The tokens and router logits that a block is probed with: typical ones, and those on which special cases show."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_TYPICAL = 10
# Float32 holds what experts make of either scale; results are compared with those of the same scale.
_SMALL, _LARGE = 1e-3, 100.0


@dataclass(frozen=True)
class Samples:
    """Rows of a probe: `tokens` [rows, features] and `logits` [rows, experts], both float32.

    `cases` says what is special about each row, "" for a typical one; `scales` [rows] is the magnitude of its token.
    """

    tokens: np.ndarray
    logits: np.ndarray
    cases: tuple[str, ...]
    scales: np.ndarray

    @property
    def typical(self) -> np.ndarray:
        """The rows that are not special, bool [rows]."""
        return np.array([not case for case in self.cases])


def draw(generator: np.random.Generator, run: int, features: int, experts: int, top_k: int) -> Samples:
    """Samples for a whole number of runs of `run` tokens each; all tokens of a run have the same scale."""
    logits, cases = map(list, zip(*_unlike_logits(generator, experts, top_k), strict=True))
    while len(logits) % run:  # a capacity of the experts shows where there are many tokens to a run
        logits.append(_preferring(generator, experts, range(top_k)))
        cases.append("many tokens that prefer the same experts")
    scales = [1.0] * len(cases)
    for scale, kinds in ((_SMALL, ("small tokens", "tokens of zeros")), (_LARGE, ("large tokens",))):
        count = -(-max(_TYPICAL, run) // run) * run
        logits += list(_typical(generator, count, experts))
        cases += [kinds[index % len(kinds)] for index in range(count)]
        scales += [scale] * count
    # In place of the last large tokens, at most all of them.
    for index, (row, case) in zip(range(len(logits) - 1, len(logits) - count - 1, -1), _grouped(experts), strict=False):
        logits[index], cases[index] = row, case
    of_zeros = np.array([case == "tokens of zeros" for case in cases])
    tokens = generator.standard_normal((len(cases), features)) * np.array(scales)[:, None]
    return Samples(
        np.where(of_zeros[:, None], 0, tokens).astype(np.float32),
        np.stack(logits).astype(np.float32),
        tuple(cases),
        np.array(scales),
    )


def _unlike_logits(generator: np.random.Generator, experts: int, top_k: int) -> Iterator[tuple[np.ndarray, str]]:
    """Typical logits, then some close together, some far apart, and for each expert some that prefer it."""
    for row in _typical(generator, _TYPICAL, experts):
        yield row, ""
    for row in _typical(generator, 4, experts):
        yield row / 100, "router logits close together"
    for row in _typical(generator, 8, experts):
        yield row * 50, "router logits far apart"
    for first in range(0, experts, top_k):
        preferred = range(first, min(first + top_k, experts))
        yield _preferring(generator, experts, preferred), f"tokens that prefer expert {', '.join(map(str, preferred))}"


def _typical(generator: np.random.Generator, count: int, experts: int) -> np.ndarray:
    return 2 * generator.standard_normal((count, experts))


def _grouped(experts: int) -> Iterator[tuple[np.ndarray, str]]:
    """Every second group has a better expert than the others, which have two good ones each: ranking groups by
    their best expert and by their best two chooses different groups. Typical scores seldom show which ranking it is, as
    one of them outweighs the rest."""
    for size in (size for size in range(2, experts // 2 + 1) if experts % size == 0):
        for best in (0, 1):
            logits = np.full((experts // size, size), -3.0)
            logits[best::2, 0] = 1
            logits[1 - best :: 2, :2] = 0.8
            without_ties = logits.reshape(-1) + np.linspace(0, 0.15, experts)
            yield without_ties, f"groups of {size} that have the best or two good experts"


def _preferring(generator: np.random.Generator, experts: int, preferred: range) -> np.ndarray:
    logits = generator.standard_normal(experts)
    logits[list(preferred)] = 6 + 0.5 * generator.standard_normal(len(preferred))
    return logits
