"""The rows of the caches: which tokens each holds, and which of them a new prompt continues."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Running = TypeVar("_Running")
# A shorter prefix is computed again in less time than its row is copied.
_SHORTEST_COPY = 16


@dataclass
class Slot(Generic[_Running]):
    """`cached`: tokens whose keys and values the row holds, from the first on."""

    row: int
    cached: list[int] = field(default_factory=list)
    running: _Running | None = None
    #: The larger, the later it was used.
    used: int = 0


@dataclass(frozen=True)
class Place(Generic[_Running]):
    """Where a prompt goes: a free slot, the slot that its prefix is copied from (None: no copy is needed), and how many
    tokens that prefix has."""

    slot: Slot[_Running]
    source: Slot[_Running] | None
    reused: int


def place(slots: Sequence[Slot[_Running]], prompt: Sequence[int], has_states: bool) -> Place[_Running] | None:
    """Where `prompt` goes, None without a free slot.

    A free slot is continued if the prompt shares most of what it holds; otherwise the longest prefix of any slot is
    copied to the free slot that was used longest ago. The prompt's last token always runs again: its logits are needed.
    """
    free = [slot for slot in slots if slot.running is None]
    if not free:
        return None
    shared = {slot.row: _shared(slot.cached, prompt, has_states) for slot in slots}
    oldest = min(free, key=lambda slot: slot.used)
    best = max(free, key=lambda slot: (shared[slot.row], slot.used))
    if best is oldest or (shared[best.row] and 2 * shared[best.row] >= len(best.cached)):
        oldest = best
    source = max(slots, key=lambda slot: (shared[slot.row], slot.used))
    if shared[source.row] >= shared[oldest.row] + _SHORTEST_COPY:
        return Place(oldest, source, shared[source.row])
    return Place(oldest, None, shared[oldest.row])


def _shared(cached: Sequence[int], prompt: Sequence[int], has_states: bool) -> int:
    """How many cached tokens the prompt can take over: a state stands behind all of them, and cannot go back."""
    longest = max(0, min(len(cached), len(prompt) - 1))
    differs = (at for at in range(longest) if cached[at] != prompt[at])
    found = next(differs, longest)
    return found if not has_states or found == len(cached) else 0
