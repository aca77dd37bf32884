"""A run's progress as lines on a stderr that is not a terminal: logs of jobs, files, pipes."""

import sys
import threading
import time
from contextlib import suppress

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.terminal.output import SafeConsole, naming, status

#: Seconds between two lines of one stage.
INTERVAL = 30.0


class ProgressLines:
    """One line when a stage begins, one when it ends, and one every `INTERVAL` seconds between, with the time that it
    took so far and, where its steps are counted, how long the rest takes at that speed."""

    def __init__(self) -> None:
        # Code that runs meanwhile may replace sys.stderr.
        self._console = SafeConsole(file=sys.stderr)
        self._stage: str | None = None
        self._begun, self._done, self._total, self._detail = 0.0, 0, 0, ""
        self._estimated = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report_now_and_then, daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._ended.set()
        self._thread.join()

    def stage(self, text: str) -> None:
        """A stage begins, and the one before has ended."""
        self.finish()
        self._begun, self._done, self._total, self._detail, self._estimated = time.monotonic(), 0, 0, "", False
        self._stage = text
        self._print(f"{text} ...")

    def step(self, done: int, total: int, text: str) -> None:
        """So many steps of the stage are done."""
        self._done, self._total, self._detail = done, total, text
        if not self._estimated and (left := self._seconds_left()) is not None:
            self._estimated = True
            if left > INTERVAL:
                self.report()

    def finish(self) -> None:
        """The stage has ended."""
        if self._stage is not None:
            self._print(f"{self._stage}: done in {duration(time.monotonic() - self._begun)}")
            self._stage = None

    def report(self) -> None:
        """Print where the stage stands."""
        if (stage := self._stage) is None:
            return
        parts = [f"{duration(time.monotonic() - self._begun)} so far"]
        if self._total:
            parts.insert(0, f"{self._done} of {self._total} ({self._done / self._total:.0%})")
        if (left := self._seconds_left()) is not None:
            parts.append(f"about {duration(left)} left")
        self._print(f"{stage}: {', '.join(filter(None, (*parts, self._detail)))}")

    def _seconds_left(self) -> float | None:
        if not 0 < self._done <= self._total:
            return None
        return (time.monotonic() - self._begun) / self._done * (self._total - self._done)

    @naming(errors.STDERR)
    def _print(self, text: str) -> None:
        if not status.quiet:
            self._console.print(text, soft_wrap=True, highlight=False)

    def _report_now_and_then(self) -> None:
        while not self._ended.wait(max(0.0, INTERVAL - (time.monotonic() - self._begun) % INTERVAL)):
            with suppress(OSError):  # the run's own lines say that stderr cannot be written
                self.report()


def duration(seconds: float) -> str:
    """A time in words, such as "9 s", "4 min 10 s" or "1 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
