"""A line of JSON on stderr for every request."""

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from prometheus_client import Counter

_ROUTES = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


def log(event: str, **details: Any) -> None:
    """Write one line; JSON escapes what would act on a terminal."""
    line = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "event": event, **details}
    print(json.dumps(line), file=sys.stderr, flush=True)


class Logged:
    """ASGI middleware: logs requests, and counts them by path and status. What is put into `scope["log"]` is logged,
    too."""

    def __init__(self, app: Any, counter: Callable[[str, str], Counter]) -> None:
        self._app, self._counter = app, counter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 499  # until a response begins: the client has gone
        scope["log"] = {}

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = (
                scope["path"] if scope["path"] in _ROUTES else "other"
            )  # a metric for each path would fill the memory
            self._counter(path, str(status)).inc()
            log(
                "request",
                method=scope["method"],
                path=path,
                status=status,
                seconds=round(time.perf_counter() - begun, 4),
                **scope["log"],
            )
