"""Programmatic dependent launch: a kernel that may start while those before it still run sees what they write, and may
write what they use, only after griddepcontrol.wait (CUDA Programming Guide, "Programmatic Dependent Launch").

Atomics and volatile, relaxed or acquire accesses may meet those of a launch that runs: kernels poll what it writes.
Launches run one after another here, so stamps of who wrote and read each word of device memory say what such a kernel
reached for too early, whatever the schedule.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import RaceError

Lanes = NDArray[Any]
_WORD = 4


class Overlap:
    """Of a device's launches, by number: those from `first` to `last` may run beside who accesses memory now."""

    def __init__(self) -> None:
        self.number = 0
        self.first = 1
        self.last = 0
        #: The last that may run beside who waited: those before a launch that did not wait itself.
        self._last_after_wait = 0
        self._waits = True
        self._triggers_early = False

    def start(self, programmatic: bool) -> bool:
        """The next launch; whether others may run beside it."""
        self.number += 1
        if not programmatic or self.number == 1:
            self.first = self.number
        elif self._waits and not self._triggers_early:
            self.first = self.number - 1  # which lets this one start once those before it are done
        self._last_after_wait = 0 if self._waits else self.number - 2
        self._waits = not programmatic
        self._triggers_early = False
        self.last = 0
        return self.first < self.number

    def wait(self) -> None:
        """By a thread of this launch: griddepcontrol.wait."""
        self._waits = True

    def trigger(self, waited: bool) -> None:
        """By a thread of this launch: griddepcontrol.launch_dependents."""
        self._triggers_early |= not waited

    def access_by(self, waited: bool) -> None:
        """Who accesses memory from now on."""
        self.last = self._last_after_wait if waited else self.number - 1


class Stamps:
    """Of the words of an allocation: the last launch that wrote and that read each."""

    def __init__(self, size: int, name: str, overlap: Overlap) -> None:
        self.name = name
        self.overlap = overlap
        self._words = -(-size // _WORD)
        self._writes: NDArray[np.uint32] | None = None
        self._reads: NDArray[np.uint32] | None = None

    def read(self, index: Lanes, size: int) -> None:
        """Elements of `size` bytes are read."""
        words = _words_of(index, size)
        if self._reads is None:
            self._reads = np.zeros(self._words, np.uint32)
        if self.overlap.last:
            self._check(self._writes, words, "reads", "writes")
        self._reads[words] = self.overlap.number

    def write(self, index: Lanes, size: int) -> None:
        words = _words_of(index, size)
        if self._writes is None:
            self._writes = np.zeros(self._words, np.uint32)
        if self.overlap.last:
            self._check(self._writes, words, "writes", "writes")
            self._check(self._reads, words, "writes", "reads")
        self._writes[words] = self.overlap.number

    def _check(self, stamps: NDArray[np.uint32] | None, words: Lanes, what: str, other: str) -> None:
        if stamps is None:
            return
        found = stamps[words]
        early = (found >= self.overlap.first) & (found <= self.overlap.last)
        if early.any():
            place = f"{self.name} at byte {int(words[early].flat[0]) * _WORD}"
            raise RaceError(f"{what} {place}, which an earlier launch {other}, before griddepcontrol.wait")


def _words_of(index: Lanes, size: int) -> Lanes:
    """The words that elements of a size are in."""
    if size <= _WORD:
        return index if size == _WORD else index // (_WORD // size)
    return (index[:, None] * (size // _WORD) + np.arange(size // _WORD)).reshape(-1)
