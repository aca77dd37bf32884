"""The GPUs that engines are built for: what each can compute and which TensorRT serves it."""

from __future__ import annotations

import difflib
import importlib.util
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_nvfp4.builder.errors import UNAVAILABLE, USAGE, BuilderError
from trt_nvfp4.builder.tensorrt import backend

if TYPE_CHECKING:
    from trt_nvfp4.graph_passes.lowerings.decision import Capabilities

TENSORRT = {"tensorrt": "10.13"}
MOE_LAYER_SINCE = {"tensorrt": "10.16"}
# Q/DQ graphs with TRT_FP4DynamicQuantize; older versions build some of them silently in float32.
NATIVE_NVFP4_SINCE = {"tensorrt_rtx": "1.7", "tensorrt": "11.0"}
# In order of preference. TensorRT-RTX takes plugins of this kind from ONNX since 1.7 (tried: 1.4, 1.5 and 1.6 do not).
EITHER = {"tensorrt_rtx": "1.7", "tensorrt": "10.13"}


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    `modules`: TensorRT package -> oldest version; `host`: machine architecture of its CPU; `moe_layer`: TensorRT has an
    MoE layer of its own for it (docs.nvidia.com/deeplearning/tensorrt, inference-library/transformers-moe).
    """

    name: str
    description: str
    arch: str
    compute_capability: tuple[int, int]
    host: str
    modules: dict[str, str]
    fp4_instructions: bool = False
    moe_layer: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """What the planner needs to know; without FP4 instructions 4-bit weights are decoded to 16 bits (W4A16)."""
        # Here: a typo is told before the planner, and torch, are imported.
        from trt_nvfp4.graph_passes.lowerings.decision import Capabilities

        return Capabilities(
            self.name,
            nvfp4_w4a4=self.fp4_instructions,
            nvfp4_w4a16=True,
            native_nvfp4=self.fp4_instructions,
            native=self.moe_layer,
            fp8=True,
            fp8_plugins=self.compute_capability == (9, 0),
            fp8_mlp_plugin=self.compute_capability in ((8, 9), (9, 0), (12, 0), (12, 1)),
            bf16=True,
        )

    def why_not_here(self) -> str | None:
        """Why this machine cannot build the engine; None when it can."""
        if platform.machine() != self.host:
            return f"its plugin library runs on {self.host}, this machine is {platform.machine()}"
        missing: list[str] = []
        for module in self.modules:
            # TensorRT-RTX, which comes first, builds for GPUs that are not here.
            if module == "tensorrt_rtx" or backend.local_compute_capability() == self.compute_capability:
                if importlib.util.find_spec(module) is not None:
                    return None
                missing.append(module.replace("_", "-"))
        if missing:
            return f"it needs {' or '.join(missing)}, which is not installed here (pip install {missing[0]})"
        return "tensorrt builds for the GPU in the machine, and this machine has no such GPU"


TARGETS = {
    target.name: target
    for target in (
        Target("thor", "Jetson Thor", "sm_110a", (11, 0), "aarch64", TENSORRT, fp4_instructions=True, moe_layer=True),
        Target("b200", "B200", "sm_100a", (10, 0), "x86_64", TENSORRT, fp4_instructions=True, moe_layer=True),
        Target("b300", "B300", "sm_103a", (10, 3), "x86_64", TENSORRT, fp4_instructions=True, moe_layer=True),
        Target("rtx-blackwell", "RTX PRO 6000, RTX 50", "sm_120a", (12, 0), "x86_64", EITHER, fp4_instructions=True),
        Target("spark", "DGX Spark (GB10)", "sm_121a", (12, 1), "aarch64", EITHER, fp4_instructions=True),
        Target("h200", "H200", "sm_90a", (9, 0), "x86_64", TENSORRT),
        Target("h100", "H100", "sm_90a", (9, 0), "x86_64", TENSORRT),
        Target("ada", "RTX 40, L4, L40S", "sm_89", (8, 9), "x86_64", EITHER),
    )
}


def arch_of(compute_capability: tuple[int, int]) -> str:
    """nvcc's name of a GPU's architecture, with the features of that generation alone where there are any."""
    major, minor = compute_capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def find_target(name: str) -> Target:
    """The target of that name; BuilderError (usage) lists the known ones otherwise."""
    if name not in TARGETS:
        known = ", ".join(f"{target.name} ({target.description})" for target in TARGETS.values())
        near = difflib.get_close_matches(name, TARGETS, 1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise BuilderError(USAGE, f"unknown target {name!r}; {hint}: {known}")
    return TARGETS[name]


def require_here(target: Target) -> None:
    """Raise BuilderError (unavailable) where this machine cannot build for `target`, saying how to go on."""
    if (reason := target.why_not_here()) is not None:
        raise BuilderError(
            UNAVAILABLE,
            f"this machine cannot build an engine for {target.name}: {reason}; "
            "add --bundle DIR to write everything that the device needs to build and check it",
        )
