"""Experts' weights as an NVFP4 checkpoint publishes them: packed tensors per expert, taken over bit by bit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint, NVFP4Weight
from trt_nvfp4.calibration.errors import CalibrationError
from trt_nvfp4.graph_passes.subgraph import Mlp
from trt_nvfp4.graph_passes.weights import StreamedTensor
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tile_scales, tiled_shape

# Names of a block's module, of its expert or shared expert in it, and of that one's linears (gate, up, down), in use.
_BLOCKS = ("", "block_sparse_moe", "mlp", "feed_forward")
_EXPERTS = "experts.{}."
_SHARED = ("shared_experts.", "shared_expert.")
_LINEARS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class PackedExperts:
    """The experts of one MoE block in a checkpoint, and its shared expert where it has one."""

    def __init__(self, checkpoint: NVFP4Checkpoint, block: str, names: Sequence[str]) -> None:
        self._checkpoint, self._block, self._names = checkpoint, block, names

    @staticmethod
    def find(checkpoint: NVFP4Checkpoint, subgraph: str) -> PackedExperts | None:
        """Those of the block of the given name (a module path, perhaps with more in front), or None."""
        path = subgraph.split(".")
        for start in range(len(path)):
            for block in _BLOCKS:
                module = ".".join([*path[start:-1], block] if block else path[start:])
                for names in _LINEARS:
                    if f"{module}.{_EXPERTS.format(0)}{names[-1]}" in checkpoint:
                        return PackedExperts(checkpoint, module, names)
        return None

    def routed(self, experts: Sequence[Mlp], down: bool) -> list[tuple[NVFP4Source, ...]]:
        """The sources of every expert's gate and up, or of its down projection.

        Raises:
            CalibrationError: an expert is missing, or the checkpoint has more than the model.
        """
        numbers = re.compile(re.escape(f"{self._block}.") + _EXPERTS.format(r"(\d+)"))
        found = 1 + max(int(match[1]) for module in self._checkpoint if (match := numbers.match(module)))
        if found != len(experts):
            raise CalibrationError(
                f"'{self._block}' has {found} NVFP4 experts in the checkpoint and {len(experts)} in the model; give "
                "the checkpoint of this very model, or leave --packed-weights out to quantize from the model's own "
                "weights"
            )
        modules = [f"{self._block}.{_EXPERTS.format(index)}" for index in range(len(experts))]
        return [self._sources(module, mlp, down) for module, mlp in zip(modules, experts, strict=True)]

    def shared(self, mlp: Mlp, down: bool) -> list[tuple[NVFP4Source, ...]] | None:
        """The same of the shared expert; None where the checkpoint left it in 16 bits."""
        for name in _SHARED:
            module = f"{self._block}.{name}"
            if f"{module}{self._names[-1]}" in self._checkpoint:
                return [self._sources(module, mlp, down)]
        return None

    def _sources(self, module: str, mlp: Mlp, down: bool) -> tuple[NVFP4Source, ...]:
        gate_name, up_name, down_name = self._names
        names = (down_name,) if down else (up_name,) if mlp.gate is None else (gate_name, up_name)
        linears = mlp.linears[-1:] if down else mlp.linears[:-1]
        for name in names:
            if f"{module}{name}" not in self._checkpoint:
                raise CalibrationError(
                    f"the checkpoint has no NVFP4 weight '{module}{name}', but others of '{self._block}': "
                    "its experts are incomplete"
                )
        return tuple(
            NVFP4Source(self._checkpoint, f"{module}{name}", linear.weight.shape)
            for name, linear in zip(names, linears, strict=True)
        )


class NVFP4Source:
    """One matrix of a checkpoint, read when asked for; `shape` is that of the model's weight."""

    def __init__(self, checkpoint: NVFP4Checkpoint, module: str, shape: tuple[int, int]) -> None:
        self._checkpoint, self.module, self.shape = checkpoint, module, shape

    def tensor_scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the weight and of its input."""
        return self._checkpoint.tensor_scales(self.module)

    def read(self) -> NVFP4Weight:
        """The weight.

        Raises:
            CalibrationError: of another shape than the model's.
        """
        weight = self._checkpoint[self.module]
        found = (weight.packed.shape[0], 2 * weight.packed.shape[1])
        if found != self.shape:
            raise CalibrationError(f"{self.module} is {found} in the checkpoint and {self.shape} in the model")
        return weight


def packed_initializers(
    prefix: str, groups: Sequence[tuple[NVFP4Source, ...]], stacked: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """As `nvfp4_initializers`; the rows of a group's matrices are interleaved. One group in memory at a time.

    Raises:
        CalibrationError: gate and up of an expert have tensor scales of their own, where the op has one for both.
    """
    rows, k = len(groups[0]) * groups[0][0].shape[0], groups[0][0].shape[1]
    lead = (len(groups),) if stacked else ()
    scales = torch.stack([_tensor_scale(group) for group in groups])

    def packed() -> Iterator[torch.Tensor]:
        for group in groups:
            yield torch.stack([source.read().packed for source in group], 1).reshape(rows, -1)

    def tiled() -> Iterator[torch.Tensor]:
        for group in groups:
            parts = [source.read().block_scales.view(torch.uint8) for source in group]
            yield tile_scales(torch.stack(parts, 1).reshape(rows, -1).view(torch.float8_e4m3fn))

    tensors = (
        StreamedTensor(prefix, ir.DataType.INT8, (*lead, rows, k // 2), packed),
        StreamedTensor(f"{prefix}.block_scales", ir.DataType.INT8, (*lead, *tiled_shape(rows, k // BLOCK)), tiled),
        ir.Tensor(scales.reshape(lead).numpy(), name=f"{prefix}.tensor_scale"),
    )
    weight, block_scales, scale = (ir.val(t.name, const_value=t) for t in tensors)
    return weight, block_scales, scale


def input_scale(groups: Sequence[tuple[NVFP4Source, ...]]) -> torch.Tensor:
    """The largest tensor scale of what the matrices are multiplied with; 0 where one is not given."""
    scales = [source.tensor_scales()[1] for group in groups for source in group]
    known = [scale for scale in scales if scale is not None]
    return torch.stack(known).max() if known and len(known) == len(scales) else torch.tensor(0.0)


def _tensor_scale(group: tuple[NVFP4Source, ...]) -> torch.Tensor:
    scales = {source.module: source.tensor_scales()[0] for source in group}
    if len({scale.item() for scale in scales.values()}) > 1:
        listed = ", ".join(f"{module} {scale.item():g}" for module, scale in scales.items())
        raise CalibrationError(
            f"gate and up must have one tensor scale in common, found {listed}; quantize the checkpoint with fused "
            "scales, or leave --packed-weights out to quantize from the model's own weights"
        )
    return next(iter(scales.values()))
