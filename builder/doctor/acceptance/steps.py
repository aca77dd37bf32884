"""The steps of the acceptance run, as data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: What a step needs of the machine. tensorrt: one that builds for the target here.
Need = Literal["gpu", "compiler", "tensorrt", "hf"]
State = Literal["passed", "failed", "skipped", "crashed", "timed out"]


@dataclass(frozen=True)
class Variant:
    """A model of `models.MODELS` with the options that it is built with."""

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A folder's name."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower())

    @property
    def is_decoder(self) -> bool:
        return self.model != "mlp"


VARIANTS = (
    Variant("W4A16 linear and gated MLP", "mlp", {"kinds": "all"}),
    Variant("W4A4 linear and gated MLP", "mlp", {"kinds": "all", "calib_data": "samples.npz"}),
    Variant("FP8 linear and MLP", "mlp", {"kinds": "all", "precision": "fp8", "calib_data": "samples.npz"}),
    Variant("TensorRT's own NVFP4", "mlp", {"precision": "native-nvfp4", "calib_data": "samples.npz"}),
    Variant("weights beside the engine", "mlp", {"kinds": "all", "strip": True}),
    Variant("attention with caches in 16 bits", "llama"),
    Variant("attention with FP8 caches", "llama", {"kv_cache": "fp8", "calib_data": "samples.npz"}),
    Variant("decoder layers in one launch", "llama", {"kinds": "all,decoder"}),
    Variant("mixture of experts", "mixture"),
    Variant("recurrent states", "hybrid"),
)


@dataclass(frozen=True)
class Step:
    """One thing that is done in a process of its own. `stage`: a function of `work.STAGES`; `limit` in seconds;
    `after`: the step that leaves what this one needs."""

    variant: Variant
    stage: str
    title: str
    needs: tuple[Need, ...]
    limit: int
    after: "Step | None" = None

    @property
    def key(self) -> str:
        """A file name."""
        return f"{self.variant.key}.{self.stage}"


def steps(builds: bool) -> list[Step]:
    """All steps in the order in which they are taken. `builds`: this machine builds engines for the target."""
    made = "planned, built and verified" if builds else "planned and rewritten"
    found = []
    for variant in VARIANTS:
        hf: tuple[Need, ...] = ("hf",) if variant.is_decoder else ()
        build = Step(variant, "build", made, hf, 900)
        found += [
            build,
            Step(variant, "plugins", "plugins on the GPU equal ONNX Runtime", ("gpu", "compiler"), 900, build),
            Step(variant, "engine", "engine equals ONNX Runtime", ("gpu", "tensorrt"), 180, build),
            Step(variant, "bench", "time beside TensorRT's own layers", ("gpu", "tensorrt"), 300, build),
        ]
    pair = Variant("two engines in one process", "mlp")
    # It runs the engines of the first two variants.
    first_steps = [step for step in found if step.stage == "build"]
    return [*found, Step(pair, "pair", "both equal ONNX Runtime", ("gpu", "tensorrt"), 180, first_steps[1])]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step. `numbers`: the measurements by name; `detail`: the reason for any state but "passed"."""

    variant: str
    title: str
    state: State
    detail: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return self.state not in ("passed", "skipped")
