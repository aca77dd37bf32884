"""The decisions on a subgraph, and which of them a target allows."""

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.text_enum import TextEnum


class Decision(TextEnum):
    """How a subgraph is computed; `registry.py` says what each one means."""

    NVFP4_W4A4 = "nvfp4_w4a4"
    NVFP4_MIXED = "nvfp4_mixed"
    NVFP4_W4A16 = "nvfp4_w4a16"
    NATIVE_NVFP4 = "native_nvfp4"
    TRT_MOE = "trt_moe"
    FP8 = "fp8"
    BF16 = "bf16"
    FP16 = "fp16"
    ATTENTION = "attention"
    ATTENTION_FP8 = "attention_fp8"
    DECODER = "decoder"
    RECURRENT = "recurrent"
    #: A plugin node that the model brought (see `load.by_hand`).
    BY_HAND = "by_hand"
    KEEP = "keep"


#: What plans of earlier versions call decisions.
RENAMED = {"native": "trt_moe"}
#: Decisions that leave the subgraph as it is.
AS_GIVEN = (Decision.KEEP, Decision.BY_HAND)


@dataclass(frozen=True)
class Capabilities:
    """The decisions that a target can carry out; `target` is its name, for reasons.

    `fp8_plugins`: the plugins for FP8 MLPs and MoE blocks have kernels of their own there; `fp8_mlp_plugin`: that for
    MLPs has.
    """

    target: str
    nvfp4_w4a4: bool = False
    nvfp4_w4a16: bool = False
    native_nvfp4: bool = False
    trt_moe: bool = False
    fp8: bool = False
    fp8_plugins: bool = False
    fp8_mlp_plugin: bool = False
    bf16: bool = True
    attention: bool = True
    attention_fp8: bool = True
