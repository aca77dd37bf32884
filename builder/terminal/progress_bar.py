"""A run's progress on stderr: bars on a terminal, lines elsewhere."""

from contextlib import nullcontext, suppress

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.terminal.output import naming, status
from trt_nvfp4.builder.terminal.progress_lines import ProgressLines


class ProgressBar:
    """The pipeline's Progress: on a terminal one line per stage, the running one moving; elsewhere `ProgressLines`. A
    context manager."""

    def __init__(self) -> None:
        self._shown: _Bars | ProgressLines = _Bars() if status.is_terminal else ProgressLines()

    @naming(errors.STDERR)
    def __enter__(self) -> "ProgressBar":
        self._shown.start()
        return self

    @naming(errors.STDERR)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._shown.finish()
        finally:
            with suppress(OSError) if kind is not None else nullcontext():  # what failed before counts
                self._shown.stop()

    @naming(errors.STDERR)
    def stage(self, text: str) -> None:
        self._shown.stage(text)

    def step(self, done: int, total: int, text: str = "") -> None:
        self._shown.step(done, total, text)


class _Bars:
    """Bars by rich."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=status,
        )
        self._task: TaskID | None = None

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        self.finish()
        self._task = self._bar.add_task(text, total=None, detail="")

    def step(self, done: int, total: int, text: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, detail=text)

    def finish(self) -> None:
        if self._task is not None:
            total = self._bar.tasks[-1].total or 1
            self._bar.update(self._task, completed=total, total=total, detail="")
