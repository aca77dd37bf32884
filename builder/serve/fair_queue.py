"""A queue of requests: clients take turns, and each client's requests keep their order of arrival."""

import threading
from collections import OrderedDict, deque

from trt_nvfp4.builder.serve.request import Request


class QueueFullError(Exception):
    """The queue is full."""


class FairQueue:
    """May be used from any thread."""

    def __init__(self, longest: int) -> None:
        """`longest`: the most requests that wait, of all clients together."""
        self._longest = longest
        self._waiting: OrderedDict[str, deque[Request]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def put(self, *requests: Request) -> None:
        """Raises QueueFullError where not all have room."""
        with self._lock:
            if self._count + len(requests) > self._longest:
                raise QueueFullError(f"{self._count} requests wait already; try again later")
            for request in requests:
                self._waiting.setdefault(request.client, deque()).append(request)
            self._count += len(requests)

    def take(self) -> Request | None:
        """Removes and returns the next client's oldest request, None if none waits. The client then goes to the end of
        the line."""
        with self._lock:
            if not self._waiting:
                return None
            client, requests = self._waiting.popitem(last=False)
            request = requests.popleft()
            if requests:
                self._waiting[client] = requests
            self._count -= 1
            return request

    def drop(self, now: float) -> list[Request]:
        """Removes cancelled requests and those past their deadline; returns the latter."""
        with self._lock:
            late = [each for requests in self._waiting.values() for each in requests if each.deadline <= now]
            kept = {
                client: deque(each for each in requests if not each.is_cancelled and each.deadline > now)
                for client, requests in self._waiting.items()
            }
            self._waiting = OrderedDict((client, requests) for client, requests in kept.items() if requests)
            self._count = sum(map(len, self._waiting.values()))
            return [each for each in late if not each.is_cancelled]
