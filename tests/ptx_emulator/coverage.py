"""What of a program its launches executed: which way from block to block, and which lanes of guarded instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .program import Program

BlockFunction = Callable[..., Any]


class Coverage:
    """`edges`: which block led to which. `enabled`, `disabled`: guarded instructions (block, index) that some
    lane executed, or passed over."""

    def __init__(self) -> None:
        self.edges: set[tuple[int, int]] = set()
        self.enabled: set[tuple[int, int]] = set()
        self.disabled: set[tuple[int, int]] = set()

    @classmethod
    def everything(cls, program: Program) -> Coverage:
        """As if each instruction had been executed, and passed over, by each of its ways."""
        found = cls()
        for number, block in enumerate(program.blocks):
            found.edges.update((number, successor) for successor in block.successors)
            guarded = {(number, index) for index, item in enumerate(block.instructions) if item.guard is not None}
            found.enabled |= guarded
            found.disabled |= guarded
        return found

    @classmethod
    def of_all(cls, parts: Iterable[Coverage]) -> Coverage:
        found = cls()
        for part in parts:
            found.edges |= part.edges
            found.enabled |= part.enabled
            found.disabled |= part.disabled
        return found

    def blocks(self) -> set[int]:
        """Those that were executed to their end."""
        return {block for block, _ in self.edges}

    def note_guard(self, block: int, index: int, enabled: Any, lanes: Any) -> None:
        """`enabled`: lanes, among those that are there, whose guard is true."""
        if enabled.any():
            self.enabled.add((block, index))
        if (lanes & ~enabled).any():
            self.disabled.add((block, index))

    def watch(self, block: int, function: BlockFunction, stay: int) -> BlockFunction:
        """The function of a block, which notes where it leads."""

        def watched(*arguments: Any) -> Any:
            following = function(*arguments)
            if type(following) is not int:
                self.edges.update((block, target) for target, _ in following[0])
            elif following != stay:
                self.edges.add((block, following))
            return following

        return watched
