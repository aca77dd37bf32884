"""The GPUs that engines are built for: what each can compute and which TensorRT serves it."""

from __future__ import annotations

import difflib
import importlib.util
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from trt_nvfp4.graph_passes.lowerings.decision import Capabilities

TENSORRT = {"tensorrt": "10.13"}
TRT_MOE_SINCE = {"tensorrt": "10.16"}
# Q/DQ graphs with TRT_FP4DynamicQuantize; older versions build some of them silently in float32.
NATIVE_NVFP4_SINCE = {"tensorrt_rtx": "1.7", "tensorrt": "11.0"}
# In order of preference. TensorRT-RTX takes plugins of this kind from ONNX since 1.7 (tried: 1.4, 1.5 and 1.6 do not).
EITHER = {"tensorrt_rtx": "1.7", "tensorrt": "10.13"}


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    `modules`: TensorRT package -> oldest version; `host`: machine architecture of its CPU; `trt_moe`: TensorRT has an
    MoE layer of its own for it (docs.nvidia.com/deeplearning/tensorrt, inference-library/transformers-moe).
    """

    name: str
    description: str
    arch: str
    compute_capability: tuple[int, int]
    host: str
    modules: dict[str, str]
    fp4_instructions: bool = False
    trt_moe: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """The planner's view of the target; without FP4 instructions 4-bit weights are decoded to 16 bits (W4A16)."""
        # Here: a typo is reported before the planner, and torch, are imported.
        from trt_nvfp4.graph_passes.lowerings.decision import Capabilities

        return Capabilities(
            self.name,
            nvfp4_w4a4=self.fp4_instructions,
            nvfp4_w4a16=True,
            native_nvfp4=self.fp4_instructions,
            trt_moe=self.trt_moe,
            fp8=True,
            fp8_plugins=self.compute_capability == (9, 0),
            fp8_mlp_plugin=self.compute_capability in ((8, 9), (9, 0), (12, 0), (12, 1)),
            bf16=True,
        )

    def unsupported_here(self) -> str | None:
        """Why this machine cannot build the engine; None when it can."""
        if platform.machine() != self.host:
            return f"its plugin library runs on {self.host}, this machine is {platform.machine()}"
        missing: list[str] = []
        for module in self.modules:
            # TensorRT-RTX, which comes first, builds for GPUs that are not here.
            if module == "tensorrt_rtx" or driver.local_compute_capability() == self.compute_capability:
                if importlib.util.find_spec(module) is not None:
                    return None
                missing.append(module.replace("_", "-"))
        if missing:
            return f"it needs {' or '.join(missing)}, which is not installed here (pip install {missing[0]})"
        return "tensorrt builds for the GPU in the machine, and this machine has no such GPU"


TARGETS = {
    target.name: target
    for target in (
        Target("thor", "Jetson Thor", "sm_110a", (11, 0), "aarch64", TENSORRT, fp4_instructions=True, trt_moe=True),
        Target("b200", "B200", "sm_100a", (10, 0), "x86_64", TENSORRT, fp4_instructions=True, trt_moe=True),
        Target("b300", "B300", "sm_103a", (10, 3), "x86_64", TENSORRT, fp4_instructions=True, trt_moe=True),
        Target("rtx-blackwell", "RTX PRO 6000, RTX 50", "sm_120a", (12, 0), "x86_64", EITHER, fp4_instructions=True),
        Target("spark", "DGX Spark (GB10)", "sm_121a", (12, 1), "aarch64", EITHER, fp4_instructions=True),
        Target("h200", "H200", "sm_90a", (9, 0), "x86_64", TENSORRT),
        Target("h100", "H100", "sm_90a", (9, 0), "x86_64", TENSORRT),
        Target("ada", "RTX 40, L4, L40S", "sm_89", (8, 9), "x86_64", EITHER),
    )
}


def arch_of(compute_capability: tuple[int, int]) -> str:
    """nvcc's name of a GPU's architecture, with the features of only that generation where there are any."""
    major, minor = compute_capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def find_target(name: str) -> Target:
    """The target of that name; UsageError lists the known ones otherwise."""
    if name not in TARGETS:
        known = ", ".join(f"{target.name} ({target.description})" for target in TARGETS.values())
        near = difflib.get_close_matches(name, TARGETS, 1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise UsageError(f"unknown target {name!r}; {hint}: {known}")
    return TARGETS[name]


def require_here(target: Target) -> None:
    """Raise UnavailableError where this machine cannot build for `target`, saying how to go on."""
    if (reason := target.unsupported_here()) is not None:
        raise UnavailableError(
            f"this machine cannot build an engine for {target.name}: {reason}; "
            "add --bundle DIR to write everything that the device needs to build and check it"
        )
