"""stdout and stderr for names that may be hostile, with failures of writing that name the stream."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trt_nvfp4.builder import errors


@contextmanager
def naming(stream: str) -> Iterator[None]:
    """Let a failure of writing to a stream name it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or stream
        raise


class SafeConsole(Console):
    """Names of nodes, tensors and files may be hostile: their control characters are escaped, brackets are not markup,
    and `:key:` is not an emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before it is measured, for columns of tables.
        return super().render_str(errors.printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else errors.printable(text), style, control)


# Width where lines are not broken.
_UNBROKEN = 10_000


class _Output(SafeConsole):
    """stdout, named where it cannot be written. In a pipe or a file, tables are plain: no lines around cells, and a row
    of each is one line, for `grep` and `cut`; COLUMNS sets another width."""

    @property
    def size(self) -> ConsoleDimensions:
        piped = not self.is_terminal and "COLUMNS" not in os.environ
        return ConsoleDimensions(_UNBROKEN, 25) if piped else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    @naming(errors.STDOUT)
    def print(self, *objects: Any, **options: Any) -> None:
        for table in objects:
            if isinstance(table, Table) and not self.is_terminal:
                table.box, table.padding = None, (0, 2, 0, 0)
        super().print(*objects, **options)


output = _Output()
status = SafeConsole(stderr=True)
