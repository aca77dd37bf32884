"""Which class of kernels serves a planned subgraph on its target, and why; docs/figures/tactics.md says the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trt_nvfp4.graph_passes.lowerings.decision import AS_GIVEN, Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import OP as FP8_MOE
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import OP as FP8_MLP
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import K_STEP, filled
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.attention import generic_reason
from trt_nvfp4.graph_passes.planning.decoder import KIND as DECODER
from trt_nvfp4.graph_passes.planning.decoder import launch_tokens, slow_reason
from trt_nvfp4.graph_passes.planning.plan import PlannedSubgraph

# plugins/kernels/heuristics: a step of the tensor cores along K; outputs of an FP8 product come in vectors of 8.
_FP8_OUTPUTS = 8


@dataclass(frozen=True)
class KernelClass:
    """`name`: "W4A4", "W4A16", "FP8", "TensorRT" (its own layers) or "generic"; `why`, and what to do about it where
    the kernels are slow ones (`remedy`, "" elsewhere)."""

    name: str
    why: str
    remedy: str = ""

    @property
    def is_generic(self) -> bool:
        """Correct and slow: no tensor cores."""
        return self.name == "generic"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def kernel_class(entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass | None:
    """What serves a replaced subgraph; None for one that stays as it is, or was put in by hand."""
    lowering = entry.lowering
    if entry.decision in AS_GIVEN:
        return None
    if entry.kind == ATTENTION:
        why = generic_reason(entry.dtype, entry.shapes["head_dim"])
        if why is not None:
            return KernelClass("generic", why, "plan keep, or export the model in 16 bits")
        return KernelClass("attention", "split over keys for few tokens, tensor cores for many")
    if entry.kind == DECODER:
        if (why := slow_reason(entry)) is not None:
            return KernelClass("parts", f"no launch for all layers: {why}")
        return KernelClass(
            "decoder", f"one launch for {launch_tokens(entry.shapes)}, the kernels of its parts for more"
        )
    if not lowering.is_plugin:
        return KernelClass("TensorRT", "TensorRT's own layers")
    if entry.dtype == "float32":
        return KernelClass(
            "generic", "its activations are float32", "leave --activations at auto, or export the model in 16 bits"
        )
    if lowering.weights == "fp8":
        return _fp8(entry, capabilities)
    if odd := [k for k in _depths(entry) if k % K_STEP]:
        return KernelClass(
            "generic",
            f"K = {odd[0]} is not a multiple of {K_STEP}",
            f"leave it in {entry.dtype} with --exclude, or plan fp8",
        )
    if lowering.arithmetic == "fp4":
        if not capabilities.nvfp4_w4a4:
            return KernelClass(
                "generic", f"{capabilities.target} has no FP4 tensor cores", "plan nvfp4_w4a16 or fp8 instead"
            )
        if entry.decision == Decision.NVFP4_MIXED:
            return KernelClass("W4A4", f"FP4 tensor cores, but for down: 4-bit weights are decoded to {entry.dtype}")
        return KernelClass("W4A4", "FP4 tensor cores")
    return KernelClass("W4A16", f"4-bit weights are decoded for products in {entry.dtype}")


def _fp8(entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
    if entry.kind != "moe":
        served = capabilities.fp8_mlp_plugin
        if (outputs := entry.shapes["out_features"]) % _FP8_OUTPUTS:
            why = f"its {outputs} outputs are not a multiple of {_FP8_OUTPUTS}"
            return KernelClass("generic", why, f"keep it in {entry.dtype}")
    else:
        served = capabilities.fp8_plugins and bool(entry.shapes["gated"])
    if not served:
        op = FP8_MOE if entry.kind == "moe" else FP8_MLP
        where = f"{op} has no kernels of its own for it on {capabilities.target}"
        return KernelClass("generic", where, f"plan NVFP4, or keep it in {entry.dtype}")
    return KernelClass("FP8", "FP8 tensor cores")


def _depths(entry: PlannedSubgraph) -> list[int]:
    """The K of each product, as its plugin has it."""
    shapes = {key: entry.shapes.get(key) or 0 for key in ("in_features", "intermediate_features", "shared_features")}
    # Experts, and the linears that a mixed MLP becomes, have the model's own K.
    if entry.kind != "moe" and entry.decision != Decision.NVFP4_MIXED:
        shapes["intermediate_features"] = filled(shapes["intermediate_features"])
    return [k for k in shapes.values() if k]


def note_kernels(entries: list[PlannedSubgraph], capabilities: Capabilities) -> dict[str, KernelClass]:
    """Writes into each entry which kernels serve it; returns the classes of the replaced ones by name."""
    found = {}
    for entry in entries:
        kernels = kernel_class(entry, capabilities)
        entry.kernels = "" if kernels is None else str(kernels)
        if kernels is not None:
            found[entry.name] = kernels
    return found


def slow_kernels(kernels: Mapping[str, KernelClass]) -> Iterator[str]:
    """A warning for each reason for which subgraphs, by name, run on generic kernels."""
    groups: dict[KernelClass, list[str]] = {}
    for name, found in kernels.items():
        if found.is_generic:
            groups.setdefault(found, []).append(name)
    for found, names in groups.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield (f"generic kernels, correct and slow, serve {', '.join(names[:2])}{more}: {found.why}; {found.remedy}")
