"""Runs the build script in a process of its own and gives back its result."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import psutil

from trt_nvfp4.builder.errors import BuilderError, BuildFailedError, reported
from trt_nvfp4.builder.tensorrt.bundle import SCRIPT
from trt_nvfp4.common.external_data import external_files

# What TensorRT-RTX 1.7 needs beside the weights: its own libraries, the parsed graph, kernels being compiled.
FIXED_BYTES = 1 << 30
# The weights as the parser maps them, as the builder holds them, and in the finished engine.
COPIES_OF_WEIGHTS = 3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of host memory that a build needs, and what the machine has free."""

    weights: int
    needed: int
    available: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def estimate_memory(model: Path) -> MemoryEstimate:
    """Estimate the memory of building `model` (its external data counted by file size)."""
    files = set(external_files(onnx.load(model, load_external_data=False), model.parent).values())
    weights = model.stat().st_size + sum(file.stat().st_size for file in files)
    return MemoryEstimate(weights, COPIES_OF_WEIGHTS * weights + FIXED_BYTES, psutil.virtual_memory().available)


def run_script(
    folder: Path, output: Path, on_event: Callable[[dict[str, Any]], None], names: Mapping[Path, Path] | None = None
) -> dict[str, Any]:
    """Run the folder's build script; returns its result, with the engine at `output`.

    `on_event` sees its stages and progress. `names` are put in place of the script's own in what it says. The script
    gets a process group of its own, so that Ctrl-C reaches only this process, which then ends it. Raises BuilderError
    with the script's exit code and message.
    """
    command = [sys.executable, str(folder / SCRIPT), "--output", str(output), "--events"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # What TensorRT and others print may be in any encoding.
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "TRT_NVFP4_LIBRARY_LINKS"},
    )
    assert process.stdout is not None

    def renamed(text: str) -> str:
        for own, name in (names or {}).items():
            text = text.replace(str(own.absolute()), str(name)).replace(str(own), str(name))
        return text

    result: dict[str, Any] | None = None
    failure: BuilderError | None = None
    last_lines: deque[str] = deque(maxlen=5)
    try:
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or "event" not in event:
                # TensorRT itself prints there at times.
                last_lines.append(line.strip())
                continue
            if event["event"] == "result":
                result = event
            elif event["event"] == "error":
                failure = reported(renamed(event["message"]), event["exit_code"])
            else:
                on_event(event)
        status = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failure is not None:
        raise failure
    if status != 0 or result is None:
        raise BuildFailedError(f"the build process {_ending(status)}: {' | '.join(last_lines) or 'no message'}")
    result["warnings"] = [renamed(warning) for warning in result["warnings"]]
    return {key: value for key, value in result.items() if key != "event"}


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"
