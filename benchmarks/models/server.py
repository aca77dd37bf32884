"""`trt-nvfp4 serve` in a process of its own on this machine, and what one of its clients sees."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STARTS_WITHIN_S, _ANSWERS_WITHIN_S = 300.0, 300.0


@dataclass(frozen=True)
class Server:
    """A running server; `log` is the file with what it writes."""

    process: subprocess.Popen[str]
    port: int
    log: Path


@contextmanager
def served(model: Path, log: Path, *options: object) -> Iterator[Server]:
    """Serve `model` with further `options` of the command. Raises RuntimeError where the server does not start."""
    words = ["serve", str(model), "--port", "0", "--max-per-client", "1024", *map(str, options)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "trt_nvfp4.builder.cli.umbrella", *words], stderr=file, text=True
        )
    try:
        yield Server(process, _port(process, log), log)
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[str], log: Path) -> int:
    until = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"ready"' in line:
                return int(json.loads(line)["address"].rpartition(":")[2])
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


@dataclass(frozen=True)
class Answer:
    """When a request began and when the pieces of its text came, in seconds of the clock that all processes share. A
    token is a piece, but for one that only begins a character."""

    begun: float
    tokens: list[float]


def streamed(port: int, prompt: Sequence[int], count: int) -> Answer:
    """Ask for the `count` greedy tokens behind `prompt`. Raises RuntimeError where they do not all come."""
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWERS_WITHIN_S)
    begun, times, last, usage = time.perf_counter(), [], b"", b""
    connection.request("POST", "/v1/completions", json.dumps(body))
    for line in connection.getresponse():
        if line.startswith(b'data: {"id"'):
            times.append(time.perf_counter())
        if line.strip():
            usage, last = last, line.strip()
    connection.close()
    if last != b"data: [DONE]" or f'"completion_tokens": {count}'.encode() not in usage:
        raise RuntimeError(f"{count} tokens were asked for; at the end came {usage[:300]!r} {last[:300]!r}")
    return Answer(begun, times[:-1])


def one_after_another(port: int, prompts: Sequence[Sequence[int]], count: int) -> list[Answer]:
    """A client that asks for each prompt once it has the answer to the one before."""
    return [streamed(port, prompt, count) for prompt in prompts]


def metrics(port: int) -> dict[str, Any]:
    """The numbers at /metrics by their names, without labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWERS_WITHIN_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {
        name: float(value) for name, value in (line.split(" ") for line in lines if line[0] != "#" and "{" not in line)
    }
