"""Times contestants that do the same work: CUDA graphs, interleaved rounds, percentiles, clocks on record."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Work = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over all rounds. `drift` is the second half's median over the first half's."""

    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float
    p90_us: float
    p99_us: float
    rounds: int
    drift: float

    @classmethod
    def of(cls, microseconds: list[float]) -> "Timing":
        median, lower, upper, p90, p99 = (float(value) for value in np.percentile(microseconds, (50, 25, 75, 90, 99)))
        half = len(microseconds) // 2
        drift = np.median(microseconds[half:]) / np.median(microseconds[:half]) if half else 1.0
        return cls(median, lower, upper, p90, p99, len(microseconds), float(drift))


class Device(Protocol):
    """A device that captures and times work. `name` is torch's name of it."""

    name: str

    def capture(self, work: Work) -> Work:
        """Run `work` once, then record it; returns its replay."""

    def seconds(self, replay: Work) -> float:
        """How long one replay takes on the device."""

    def stream(self) -> int:
        """The handle of the current stream."""

    def environment(self) -> dict[str, Any]:
        """GPU, driver, clocks and temperature now."""


class CudaDevice:
    """This machine's first GPU; work is captured in CUDA graphs and timed by events."""

    name = "cuda"

    def capture(self, work: Work) -> Work:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, replay: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def environment(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            **_nvidia_smi(),
        }


# Jetson's nvidia-smi knows only some of these.
_QUERIES = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "max_sm_clock": "clocks.max.sm",
    "temperature_c": "temperature.gpu",
    "power": "power.draw",
    "throttled": "clocks_event_reasons.active",
}


def _nvidia_smi() -> dict[str, str]:
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {"driver": "unknown (no nvidia-smi)"}
    return dict(zip(_QUERIES, found.stdout.strip().split(", "), strict=True))


def interleave(
    device: Device,
    contestants: Mapping[str, Work],
    rounds: int,
    warm_up: int = 2,
    calls: Mapping[str, int] | None = None,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time every contestant once per round, there and back (A B C, C B A, ...): clocks and heat meet all alike.

    `calls`: how many calls one run of a contestant's work holds (default 1); times are per call.
    """
    replays = {name: device.capture(work) for name, work in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for number in range(warm_up + rounds):
        order = list(replays) if number % 2 == 0 else list(reversed(replays))
        for name in order:
            seconds = device.seconds(replays[name])
            if number >= warm_up:
                samples[name].append(seconds * 1e6 / (calls or {}).get(name, 1))
        if on_round is not None:
            on_round(number + 1, warm_up + rounds)
    return {name: Timing.of(values) for name, values in samples.items()}
