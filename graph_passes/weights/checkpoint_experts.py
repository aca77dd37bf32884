"""An MoE block's experts as an NVFP4 checkpoint names them."""

import re
from collections.abc import Sequence

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.subgraphs.parts import Mlp
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.weights.checkpoint_weights import NVFP4Source, common_scale
from trt_nvfp4.graph_passes.weights.mlp_inputs import linears_of

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
    def find(checkpoint: NVFP4Checkpoint, subgraph: MoeSubgraph) -> "PackedExperts | None":
        """Those of a block, by its name (a module path, perhaps with more in front). None where the checkpoint has none
        of them, or is the model's own and has not all of them with gate and up under one tensor scale."""
        path, moe = subgraph.name.split("."), subgraph.moe
        assert moe is not None
        for start in range(len(path)):
            for block in _BLOCKS:
                module = ".".join([*path[start:-1], block] if block else path[start:])
                for names in _LINEARS:
                    if f"{module}.{_EXPERTS.format(0)}{names[-1]}" in checkpoint:
                        found = PackedExperts(checkpoint, module, names)
                        return found if not checkpoint.of_model or found._has_all(moe.experts) else None
        return None

    def _has_all(self, experts: Sequence[Mlp]) -> bool:
        try:
            groups = [group for down in (False, True) for group in self.routed(experts, down)]
        except CalibrationError:
            return False
        return all(common_scale(group) is not None for group in groups)

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
                "the checkpoint of this very model, or leave --set packed-weights out to quantize from the model's own "
                "weights"
            )
        modules = [f"{self._block}.{_EXPERTS.format(index)}" for index in range(len(experts))]
        return [self._sources(module, mlp, down) for module, mlp in zip(modules, experts, strict=True)]

    def shared(self, mlp: Mlp, down: bool) -> list[tuple[NVFP4Source, ...]] | None:
        """The same of the shared expert; None where the checkpoint left it in 16 bits, or cannot be taken over."""
        for name in _SHARED:
            module = f"{self._block}.{name}"
            if f"{module}{self._names[-1]}" in self._checkpoint:
                sources = self._sources(module, mlp, down)
                return None if self._checkpoint.of_model and common_scale(sources) is None else [sources]
        return None

    def _sources(self, module: str, mlp: Mlp, down: bool) -> tuple[NVFP4Source, ...]:
        gate_name, up_name, down_name = self._names
        names = (down_name,) if down else (up_name,) if mlp.gate is None else (gate_name, up_name)
        for name in names:
            if f"{module}{name}" not in self._checkpoint:
                raise CalibrationError(
                    f"the checkpoint has no NVFP4 weight '{module}{name}', but others of '{self._block}': "
                    "its experts are incomplete"
                )
        return tuple(
            NVFP4Source(self._checkpoint, f"{module}{name}", linear.weight)
            for name, linear in zip(names, linears_of(mlp, down), strict=True)
        )
