"""The decoder, as the event loop sees it: requests go to its process, events come back."""

import asyncio
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.builder.serve.engine import Asked, Facts, Numbers, run
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.request import Event, Failed, Generated, Request
from trt_nvfp4.builder.serve.serve_options import ServeOptions

# Seconds for a step to end, and the model to close.
_ENDS_WITHIN = 10.0


class Decoder:
    """`failure`: what ended the process; None while all is well. `numbers`: its last ones, None before the first."""

    def __init__(self, options: ServeOptions) -> None:
        """Starts the process."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, options), name="decoder")
        self._process.start()
        theirs.close()
        self.failure: str | None = None
        self.numbers: Numbers | None = None
        self._keys = itertools.count()
        self._takers: dict[int, Callable[[Event], None]] = {}

    def wait(self) -> Facts:
        """Returns when the model is open. Raises what opening it raised."""
        try:
            found = self._connection.recv()
        except EOFError:
            raise UnavailableError("the decoder's process ended while it opened the model") from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Facts)
        return found

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take events in the loop from now on."""
        loop.add_reader(self._connection.fileno(), self._read)

    def submit(
        self, requests: Sequence[tuple[Request, Callable[[Event], None]]], schema: dict[str, Any] | None,
        pixels: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        """Let requests of one body wait for a slot; each comes with what takes its events, up to a last token or a
        failure. Raises UnavailableError after a failure of the process."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        for request, take in requests:
            request.key = next(self._keys)
            self._takers[request.key] = take
        self._send(Asked([request for request, _ in requests], schema, pixels))

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests that have no end yet."""
        keys = [request.key for request in requests if self._takers.pop(request.key, None) is not None]
        if keys and self.failure is None:
            self._send(keys)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(_ENDS_WITHIN)
        self._process.kill()
        self._process.join()

    def _send(self, what: object) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))
        except OSError:
            return  # what it has sent is read first, then its end

    def _read(self) -> None:
        try:
            found = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._fail()
            return
        if isinstance(found, Numbers):
            self.numbers = found
            return
        for key, event in found:
            is_last = isinstance(event, Failed) or (isinstance(event, Generated) and event.finish is not None)
            take = self._takers.pop(key, None) if is_last else self._takers.get(key)
            if take is not None:
                take(event)

    def _fail(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._process.join(1.0)
        log("failure", message=f"the decoder's process has ended with exit code {self._process.exitcode}")
        self.failure = "the decoder has failed; the server's log has more"
        takers, self._takers = self._takers, {}
        for take in takers.values():
            take(Failed("model", self.failure))
