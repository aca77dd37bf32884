"""Times contestants that compute the same thing: CUDA graphs, interleaved rounds, cold L2, results checked."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.plugins.toolchain import find_nvcc

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, and the middle half's bounds, over all rounds."""

    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float
    rounds: int


def capture(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``work``, which has run once before (lazy initialisation stays out of it)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def interleave(
    contestants: Mapping[str, Callable[[], Any]], calls: Mapping[str, int], rounds: int
) -> dict[str, Timing]:
    """Times every contestant in every round, in turn (A/B/C/A/B/C), so that clocks and heat meet all alike.

    A contestant's work holds ``calls[name]`` calls, over weights that together exceed the L2 cache many times.
    """
    graphs = {name: capture(work) for name, work in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 2:
                samples[name].append(start.elapsed_time(end) * 1e3 / calls[name])
    return {name: _timing(values) for name, values in samples.items()}


def read_bandwidth(gigabytes: int = 4, rounds: int = 15) -> float:
    """Bytes per second at which this GPU streams ``gigabytes`` GiB from its memory."""
    source = HERE / "read_bandwidth.cu"
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_bandwidth.so"
        toolchain = find_nvcc()
        subprocess.run(
            [toolchain.nvcc, "-O3", "-shared", "-Xcompiler=-fPIC", f"-arch=sm_{major}{minor}", "-o", library, source],
            check=True,
        )
        read_all = ctypes.CDLL(str(library)).readAll
    data = torch.randint(0, 255, (gigabytes << 30,), dtype=torch.uint8, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count

    def work() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), ctypes.c_void_p(out.data_ptr())
        if status := read_all(*pointers, blocks, stream):
            raise RuntimeError(f"read_bandwidth: CUDA error {status}")

    timing = interleave({"read": work}, {"read": 1}, rounds)["read"]
    return data.numel() / timing.median_us * 1e6


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """||y - reference|| / ||reference||, in float64."""
    difference = y.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


def environment() -> dict[str, Any]:
    """What a reader needs to run it again."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    return {
        "gpu": name,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": find_nvcc().version,
        "command": " ".join(["python", *sys.argv]),
    }


def as_json(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {name: asdict(timing) for name, timing in timings.items()}


def _timing(values: list[float]) -> Timing:
    lower, median, upper = statistics.quantiles(values, n=4)
    return Timing(median, lower, upper, len(values))
