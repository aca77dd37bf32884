"""What tests of bench-engine put in the place of progress, GPU, request and plan."""

from pathlib import Path
from typing import Any

from trt_nvfp4.builder.bench.subject import Request
from trt_nvfp4.builder.bench.timing import Work
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target


class Recorded:
    """A Progress that keeps its stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, done: int, total: int, text: str = "") -> None:
        assert done >= 0


class CpuDevice:
    """Stands for a GPU: runs the work, and says that each run took one second more than the one before."""

    name = "cpu"
    gpu = "a test"

    def __init__(self) -> None:
        self.clock = 0

    def capture(self, work: Work) -> Work:
        work()
        return work

    def seconds(self, replay: Work) -> float:
        replay()
        self.clock += 1
        return float(self.clock)

    def stream(self) -> int:
        return 0

    def environment(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "driver": "0", "sm_clock": "1 MHz", "l2_bytes": 1 << 10}


def request(model: Path, **options: Any) -> Request:
    return Request(model, **{"target": "rtx-blackwell", "rounds": 2, "warm_up": 0, **options})


def planned(model: Path) -> Path:
    """OUT.plan.yaml of a run that stopped there."""
    engine = model.parent / "out" / "o.engine"
    pipeline.run(pipeline.Request(model, find_target("rtx-blackwell"), engine, stop_after="plan"), Recorded())
    return engine.with_suffix(".plan.yaml")
