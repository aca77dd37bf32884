"""The thread in which the scheduler runs."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.runner import SlotRunner
from trt_nvfp4.builder.serve.fair_queue import FairQueue
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.request import Event, Failed, Request
from trt_nvfp4.builder.serve.scheduler import Scheduler, Told

_T = TypeVar("_T")
# Seconds between two looks at deadlines while nothing runs.
_IDLE = 1.0


class Engine:
    """Takes requests from the event loop, and gives their events there. `failure`: what ended the thread; None while
    all is well."""

    def __init__(self, runner: SlotRunner, slots: int, longest_queue: int, drafter: Drafter | None) -> None:
        """Raises UsageError as the scheduler does."""
        self.queue = FairQueue(longest_queue)
        self.scheduler = Scheduler(runner, slots, self.queue, self._deliver, drafter)
        self.scheduler.warm_up()
        self.failure: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._takers: dict[Request, Callable[[Event], None]] = {}
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stops = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], takers: Iterable[Callable[[Event], None]]) -> None:
        """Let requests wait for a slot, each with what takes its events. Raises UsageError for a prompt that does not
        fit, QueueFullError, and UnavailableError after a failure."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        for request in requests:
            self.scheduler.check(request)
        self._loop = asyncio.get_running_loop()
        self.queue.put(*requests)
        self._takers.update(zip(requests, takers, strict=True))
        self._news.set()

    def cancel(self, requests: Iterable[Request]) -> None:
        """End what nobody waits for; no event follows."""
        for request in requests:
            request.is_cancelled = True
            self._takers.pop(request, None)

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the decoder's thread, between two steps. Raises UnavailableError after a failure."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        future: Future[_T] = Future()
        self._jobs.append((future, work))
        self._news.set()
        return future

    def stop(self) -> None:
        """End the thread."""
        self._stops = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stops:
                self._work()
                if not self.scheduler.step():
                    self._news.wait(_IDLE)
                    self._news.clear()
        except Exception as error:
            log("failure", message=errors.message(error), type=type(error).__name__)
            self.failure = "the decoder has failed; the server's log has more"
            self._in_loop(self._fail, self.failure)
        while self._jobs:
            self._jobs.popleft()[0].set_exception(UnavailableError(self.failure or "the server stops"))

    def _work(self) -> None:
        while self._jobs:
            future, work = self._jobs.popleft()
            try:
                future.set_result(work())
            except Exception as error:  # a request's, not the decoder's
                future.set_exception(error)

    def _deliver(self, told: list[Told]) -> None:
        self._in_loop(self._give, told)  # all of a step at once: each waking costs the decoder time

    def _in_loop(self, function: Callable[[_T], None], given: _T) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, given)

    def _give(self, told: list[Told]) -> None:
        for request, event in told:
            if (take := self._takers.get(request)) is not None:
                take(event)

    def _fail(self, why: str) -> None:
        for take in list(self._takers.values()):
            take(Failed("model", why))
