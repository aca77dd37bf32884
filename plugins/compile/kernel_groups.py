"""Which sources a library is made of: groups of kernels, and the groups that the nodes of a model need.

A library links `CORE` and the groups that its nodes need, with those that a shape could need at run time. What is not
linked has the address null (``TRT_NVFP4_OPTIONAL`` in kernels/api/launch.h); the launchers report it as an error when
an engine is built, and again when it runs.

A new group of kernels is one entry of `GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

#: In every library: what all adapters share, and errors.
CORE = (
    *(f"adapters/{name}.cpp" for name in ("exports", "op", "plugin", "self_registration", "unversioned_name")),
    "kernels/api/error.cpp",
)


@dataclass(frozen=True)
class OpUse:
    """A node that a plugin serves: its op, its attributes, and the type of its activations as ONNX names it
    ("float16"; None: unknown, as any)."""

    op: str
    attributes: Mapping[str, int | float | str]
    dtype: str | None = None

    def quantizes(self) -> bool:
        return bool(self.attributes.get("quantize_activations", 0))

    def is_16_bit(self) -> bool:
        return self.dtype != "float"

    def may_be(self, dtype: str) -> bool:
        return self.dtype in (None, dtype)


@dataclass(frozen=True)
class KernelGroup:
    """Sources that are linked together or not at all. A pattern is relative to the folder plugins/; sources whose names
    begin with an architecture newer than sm80 are compiled for its family only (see `library.sources_of`).

    It is linked where a node of one of the `ops` needs it: any node, or those that `needed` says.
    """

    name: str
    sources: tuple[str, ...]
    ops: tuple[str, ...]
    needed: Callable[[OpUse], bool] | None = None

    def serves(self, use: OpUse) -> bool:
        return use.op in self.ops and (self.needed is None or self.needed(use))


_MLPS = ("NVFP4GatedMLP", "NVFP4PersistentMLP")
_DECODERS = ("NVFP4Decoder", "NVFP4MoEDecoder")
_ATTENTIONS = ("CachedAttention", *_DECODERS)


def _w4a16(use: OpUse) -> bool:
    return use.is_16_bit() and not use.quantizes()


def _w4a4(use: OpUse) -> bool:
    return use.is_16_bit() and use.quantizes()


def _gated(use: OpUse) -> bool:
    return use.op == "NVFP4GatedMLP" or bool(use.attributes["gated"])


def _decoder(dtype: str, fp8_cache: int) -> Callable[[OpUse], bool]:
    return lambda use: use.may_be(dtype) and use.attributes.get("fp8_cache", 0) == fp8_cache


GROUPS = (
    KernelGroup("quantize", ("adapters/quantize.cpp", "kernels/api/dense/quantize.cu"), ("NVFP4Quantize",)),
    KernelGroup("linear", ("adapters/linear.cpp", "kernels/api/dense/linear.cu"), ("NVFP4Linear", *_DECODERS)),
    KernelGroup(
        "mlp",
        ("adapters/gated_mlp.cpp", "adapters/persistent_mlp.cpp", "kernels/api/dense/mlp.cu"),
        (*_MLPS, "NVFP4Decoder"),
    ),
    KernelGroup(
        "w4a16",
        ("kernels/api/dense/w4a16*.cu", *(f"kernels/w4a16/sm90/sm90_w4a16_{op}.cu" for op in ("linear", "mlp"))),
        ("NVFP4Linear", *_MLPS, *_DECODERS),
        _w4a16,
    ),
    KernelGroup("w4a4", ("kernels/w4a4/*_w4a4.cu", "kernels/w4a4/*_pair.cu"), ("NVFP4Linear", *_MLPS), _w4a4),
    KernelGroup("w4a4_gated", ("kernels/w4a4/*_w4a4_gated.cu",), _MLPS, lambda use: _w4a4(use) and _gated(use)),
    KernelGroup(
        "fp8_mlp",
        (
            "adapters/fp8_gated_mlp.cpp",
            "kernels/api/dense/fp8_mlp.cu",
            "kernels/fp8/*_fp8.cu",
            *(f"kernels/fp8/sm90_fp8_{gemm}.cu" for gemm in ("dense", "gated")),
        ),
        ("FP8GatedMLP",),
    ),
    KernelGroup("moe_plan", ("kernels/api/moe/moe_plan.cu",), ("NVFP4MoE", "FP8MoE", "NVFP4MoEDecoder")),
    KernelGroup("moe", ("adapters/moe.cpp", "kernels/api/moe/moe.cu"), ("NVFP4MoE", "NVFP4MoEDecoder")),
    KernelGroup(
        "w4a16_moe",
        ("kernels/api/moe/w4a16_moe.cu", "kernels/w4a16/sm90/sm90_w4a16_moe.cu"),
        ("NVFP4MoE", "NVFP4MoEDecoder"),
        _w4a16,
    ),
    KernelGroup("w4a4_moe", ("kernels/api/moe/w4a4_moe.cu", "kernels/w4a4/*_experts.cu"), ("NVFP4MoE",), _w4a4),
    KernelGroup(
        "fp8_moe",
        ("adapters/fp8_moe.cpp", "kernels/api/moe/fp8_*.cu", "kernels/fp8/sm90_fp8_experts.cu"),
        ("FP8MoE",),
    ),
    KernelGroup(
        "attention",
        ("adapters/cached_attention.cpp", "kernels/api/attention/attention.cu"),
        _ATTENTIONS,
    ),
    KernelGroup(
        "tensor_core_attention",
        ("kernels/attention/*.cu", "kernels/attention/sm90/*.cu"),
        _ATTENTIONS,
        OpUse.is_16_bit,
    ),
    KernelGroup(
        "decoder",
        ("adapters/decoder.cpp", "kernels/api/attention/decoder*.cu"),
        _DECODERS,
    ),
    *(
        KernelGroup(
            f"decoder_{short}{'_fp8' * fp8}",
            (f"kernels/decoder/sm80_decoder_{short}{'_fp8' * fp8}.cu",),
            _DECODERS,
            _decoder(dtype, fp8),
        )
        for short, dtype in (("half", "float16"), ("bf16", "bfloat16"))
        for fp8 in (0, 1)
    ),
    KernelGroup(
        "linear_attention",
        (
            "adapters/linear_attention.cpp",
            "kernels/api/recurrent/linear_attention.cu",
            "kernels/recurrent/*linear_attention*.cu",
        ),
        ("LinearAttention",),
    ),
    KernelGroup(
        "causal_conv", ("adapters/causal_conv.cpp", "kernels/api/recurrent/causal_conv.cu"), ("CausalConvWithState",)
    ),
)


def all_groups() -> frozenset[str]:
    return frozenset(group.name for group in GROUPS)


def groups_of(uses: Iterable[OpUse]) -> frozenset[str]:
    """Names of the groups that the nodes need, whatever their shapes."""
    needed = list(uses)
    return frozenset(group.name for group in GROUPS if any(group.serves(use) for use in needed))


def ops_of(groups: Collection[str]) -> frozenset[str]:
    """The ops that a library of these groups can create: those for which no group is missing that all nodes need."""
    ops = {op for group in GROUPS for op in group.ops}
    lacking = {op for group in GROUPS if group.needed is None and group.name not in groups for op in group.ops}
    return frozenset(ops - lacking)
