"""The thread in which the scheduler runs."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.builder.serve.fair_queue import FairQueue
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.request import Failed, Request
from trt_nvfp4.builder.serve.scheduler import Scheduler

_T = TypeVar("_T")
# Seconds between two looks at deadlines while nothing runs.
_IDLE = 1.0


class Engine:
    """Takes requests from any thread. `failure`: what ended the thread; None while all is well."""

    def __init__(self, scheduler: Scheduler, queue: FairQueue) -> None:
        self.scheduler, self.queue = scheduler, queue
        self.failure: str | None = None
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stops = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Let the request wait for a slot. Raises UsageError for a prompt that does not fit, QueueFullError, and
        UnavailableError after a failure."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        self.scheduler.check(request)
        self.queue.put(request)
        self._news.set()
        if self.failure is not None:  # meanwhile
            self.scheduler.fail(Failed("model", self.failure))

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the decoder's thread, between two steps. Raises UnavailableError after a failure."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        future: Future[_T] = Future()
        self._jobs.append((future, work))
        self._news.set()
        return future

    def stop(self) -> None:
        """End what still runs, and the thread."""
        self._stops = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        why = Failed("stopped", "the server stops")
        try:
            while not self._stops:
                self._work()
                if not self.scheduler.step():
                    self._news.wait(_IDLE)
                    self._news.clear()
        except Exception as error:
            log("failure", message=errors.message(error), type=type(error).__name__)
            self.failure = "the decoder has failed; the server's log has more"
            why = Failed("model", self.failure)
        self.scheduler.fail(why)
        while self._jobs:
            self._jobs.popleft()[0].set_exception(UnavailableError(why.message))

    def _work(self) -> None:
        while self._jobs:
            future, work = self._jobs.popleft()
            try:
                future.set_result(work())
            except Exception as error:  # a request's, not the decoder's
                future.set_exception(error)
