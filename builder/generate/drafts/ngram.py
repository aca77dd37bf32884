"""Prompt lookup: what followed the last tokens where they stood before (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import Drafter

#: Lengths of the endings that are looked up, the longest first. Shorter ones recur by chance.
_LENGTHS = (5, 4, 3, 2)


class NgramDrafter(Drafter):
    """Needs no model: text that repeats itself or its prompt is drafted from there."""

    name = "ngram"

    def __init__(self) -> None:
        self._texts: list[_Index] = []

    def start(self, batch: int) -> None:
        self._texts = [_Index() for _ in range(batch)]

    def begin(self, number: int, source: int, kept: int) -> None:
        self._texts[number] = _Index()

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        return [index.propose(text, most) for index, text, most in zip(self._texts, texts, wanted, strict=True)]


class _Index:
    """Where each run of tokens of one text last ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        # All but the ending itself, which would only find itself.
        for end in range(self._indexed + 1, len(text)):
            for length in _LENGTHS:
                if length <= end:
                    self._ends[tuple(text[end - length : end])] = end
        self._indexed = max(self._indexed, len(text) - 1)
        if not most:
            return []
        for length in _LENGTHS:
            found = self._ends.get(tuple(text[-length:])) if length < len(text) else None
            if found is not None:
                return _continued(text, found, most)
        return []


def _continued(text: Sequence[int], begin: int, most: int) -> list[int]:
    """`most` tokens from `begin` on; where the text ends, what it repeats goes on."""
    period = len(text) - begin
    return [text[begin + place % period] for place in range(most)]
