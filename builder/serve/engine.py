"""The decoder's process, which shares no interpreter with HTTP: each would wait for the other at every token."""

import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.components.manifest import FILE
from trt_nvfp4.builder.components.picture_slots import PictureSlots
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.drafts.drafter import Drafter, DraftStatistics
from trt_nvfp4.builder.generate.drafts.open import NGRAM, NONE, open_drafter
from trt_nvfp4.builder.generate.open import opened, tokenizer_folder
from trt_nvfp4.builder.generate.runner import SlotRunner
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.serve.fair_queue import FairQueue, QueueFullError
from trt_nvfp4.builder.serve.grammar import Grammars
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.request import Failed, Generated, Request
from trt_nvfp4.builder.serve.scheduler import Scheduler, Statistics, Told
from trt_nvfp4.builder.serve.serve_options import ServeOptions

_T = TypeVar("_T")
# Seconds between two looks at deadlines while nothing runs, and between two `Numbers`.
_IDLE, _NUMBERS = 1.0, 0.1
_SLOTS = 8


@dataclass(frozen=True)
class Facts:
    """What is known of a decoder once it is ready. `preprocessing` of images; None: the model takes none."""

    runs_on: str
    capacity: int
    slots: int
    ends: frozenset[int]
    preprocessing: dict[str, Any] | None


@dataclass(frozen=True)
class Numbers:
    """For metrics: `used` is the share of the caches that holds tokens."""

    waiting: int
    running: int
    slots: int
    used: float
    sums: Statistics
    drafts: DraftStatistics


@dataclass(frozen=True)
class Asked:
    """Requests of one body, and what becomes part of them here: a JSON schema, and pixel values of images."""

    requests: Sequence[Request]
    schema: dict[str, Any] | None = None
    pixels: Sequence[np.ndarray] = ()


def run(connection: Connection, options: ServeOptions) -> None:
    """The process: sends `Facts`, or the error that opening the model ends with, then lists of events by the keys of
    their requests, and `Numbers`; receives `Asked` and the keys of requests that nobody waits for. Ends with the
    connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all processes of a terminal
    with suppress(BrokenPipeError, ConnectionResetError), ExitStack() as stack:  # whom it works for has gone
        try:
            engine = Engine(connection, options, stack)
        except Exception as error:
            connection.send(error)
            return
        connection.send(engine.facts)
        try:
            engine.work()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            log("failure", message=errors.message(error), type=type(error).__name__)
            raise SystemExit(1) from None


class Engine:
    """The decoder's thread, and one that receives."""

    def __init__(self, connection: Connection, options: ServeOptions, stack: ExitStack) -> None:
        """`stack` closes the model."""
        runner = _opened(options, stack)
        self._connection, self._queue = connection, FairQueue(options.max_queue)
        self._pictures = runner if isinstance(runner, PictureSlots) else None
        self._tokenizer = Tokenizer(options.tokenizer or tokenizer_folder(options.model))
        slots = options.slots or min(_SLOTS, runner.decoder.max_batch)
        drafter = _drafter(options, runner, stack)
        self._scheduler = Scheduler(runner, slots, self._queue, self._deliver, drafter)
        self._scheduler.warm_up()
        self._requests: dict[int, Request] = {}
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._news, self._stops, self._told = threading.Event(), False, 0.0
        self._pool = ThreadPoolExecutor(2)
        preprocessing = None if self._pictures is None else self._pictures.preprocessing
        ends = frozenset(runner.decoder.eos_token_ids)
        self.facts = Facts(runner.name, self._scheduler.capacity, slots, ends, preprocessing)

    def work(self) -> None:
        """Run steps until the connection ends."""
        threading.Thread(target=self._receive, daemon=True).start()
        while not self._stops:
            while self._jobs:
                future, work = self._jobs.popleft()
                try:
                    future.set_result(work())
                except Exception as error:  # a request's, not the decoder's
                    future.set_exception(error)
            if not self._scheduler.step():
                self._tell(self._numbers())
                self._news.wait(_IDLE)
                self._news.clear()

    def _receive(self) -> None:
        try:
            while True:
                asked = pickle.loads(self._connection.recv_bytes())
                if isinstance(asked, Asked):
                    self._requests |= {request.key: request for request in asked.requests}
                    if asked.schema is None and not asked.pixels:
                        self._take(asked)
                    else:
                        self._pool.submit(self._take, asked)
                    continue
                for key in asked:
                    if (request := self._requests.pop(key, None)) is not None:
                        request.is_cancelled = True
        except (EOFError, OSError):
            self._stops = True
            self._news.set()

    def _take(self, asked: Asked) -> None:
        """Let requests wait for a slot."""
        reason: Any = "request"
        try:
            pictures = [self._in_decoder(partial(self._see, each)).result() for each in asked.pixels]
            for request in asked.requests:
                if self._pictures is not None and pictures:
                    request.prompt, request.pictures = self._pictures.placed(request.prompt, pictures), pictures
                if asked.schema is not None:
                    request.constraint = self._grammars.json(asked.schema)
                self._scheduler.check(request)
            self._queue.put(*asked.requests)
            self._news.set()
            return
        except UsageError as error:
            why = str(error)
        except QueueFullError as error:
            reason, why = "full", str(error)
        except Exception as error:
            log("failure", message=errors.message(error), type=type(error).__name__)
            reason, why = "model", "the request has failed; the server's log has more"
        failed = [(request, Failed(reason, why)) for request in asked.requests]
        self._in_decoder(lambda: self._deliver(list(failed)))

    def _in_decoder(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the decoder's thread, between two steps."""
        future: Future[_T] = Future()
        self._jobs.append((future, work))
        self._news.set()
        return future

    def _see(self, pixels: np.ndarray) -> Any:
        assert self._pictures is not None
        return self._pictures.see(pixels)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._tokenizer, self._scheduler.decoder)

    def _deliver(self, events: list[Told]) -> None:
        self._tell([(request.key, event) for request, event in events])
        for request, event in events:
            if isinstance(event, Failed) or (isinstance(event, Generated) and event.finish is not None):
                self._requests.pop(request.key, None)
        if time.monotonic() > self._told + _NUMBERS:
            self._tell(self._numbers())

    def _numbers(self) -> Numbers:
        self._told = time.monotonic()
        scheduler, slots = self._scheduler, self._scheduler.slots
        used = sum(len(slot.cached) for slot in slots) / (scheduler.capacity * len(slots))
        drafts = scheduler.drafting.statistics
        return Numbers(len(self._queue), scheduler.running, len(slots), used, scheduler.statistics, drafts)

    def _tell(self, what: object) -> None:
        self._connection.send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))


def _opened(options: ServeOptions, stack: ExitStack) -> SlotRunner:
    if not (options.model / FILE).is_file():
        return opened(options.model, stack, runner=options.runner)[0]
    found = PictureSlots(options.model, options.runner)
    stack.callback(found.close)
    return found


def _drafter(options: ServeOptions, runner: SlotRunner, stack: ExitStack) -> Drafter | None:
    """As `generate` takes it; none for a model with recurrent states, and n-grams only for one of parts."""
    by_model = options.draft not in (None, NGRAM, NONE)
    if runner.decoder.states or (by_model and isinstance(runner, PictureSlots)):
        if by_model:
            raise UsageError(f"--draft {options.draft}: {runner.name} takes none in serve; leave it out")
        return None
    folder = options.tokenizer or tokenizer_folder(options.model)
    return open_drafter(options.draft, options.model, folder, runner, stack, options.runner)
