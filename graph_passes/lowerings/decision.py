"""What may be decided on a subgraph, and what a target allows."""

from __future__ import annotations

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.text_enum import TextEnum


class Decision(TextEnum):
    """How a subgraph is computed; `registry.py` says what each one means."""

    NVFP4_W4A4 = "nvfp4_w4a4"
    NVFP4_MIXED = "nvfp4_mixed"
    NVFP4_W4A16 = "nvfp4_w4a16"
    NATIVE_NVFP4 = "native_nvfp4"
    NATIVE = "native"
    FP8 = "fp8"
    BF16 = "bf16"
    FP16 = "fp16"
    ATTENTION = "attention"
    ATTENTION_FP8 = "attention_fp8"
    DECODER = "decoder"
    #: A plugin node that the model brought (see `load.by_hand`).
    BY_HAND = "by_hand"
    KEEP = "keep"


#: Decisions that leave the subgraph as it is.
AS_GIVEN = (Decision.KEEP, Decision.BY_HAND)


@dataclass(frozen=True)
class Capabilities:
    """What a target can compute with; `target` is its name, for the reasons. `fp8_plugins`: those for FP8
    MLPs and MoE blocks have kernels of their own there, `fp8_mlp_plugin`: that for MLPs has."""

    target: str
    nvfp4_w4a4: bool = False
    nvfp4_w4a16: bool = False
    native_nvfp4: bool = False
    native: bool = False
    fp8: bool = False
    fp8_plugins: bool = False
    fp8_mlp_plugin: bool = False
    bf16: bool = True
    attention: bool = True
    attention_fp8: bool = True
