"""humming-kernels' MoE GEMMs on the same NVFP4 experts as the plugin.

Timed are its two GEMMs, the activation between them (compiled) and the shared expert's. Choosing experts, sorting,
gathering rows and the weighted sums are done beforehand: the plugin's time holds all of that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contestants import humming_nvfp4
from trt_nvfp4.builder.bench.timing import Work
from trt_nvfp4.plugins.ops.activation import Activation, gate

KINDS = ("indexed", "grouped_contiguous")  # humming's names: rows picked by the kernel, or gathered before


@dataclass
class HummingExperts:
    """tensors: the op's, from gate_up_weight on. attributes: the op's, all of them."""

    tensors: list[torch.Tensor]
    attributes: dict[str, Any]

    def __post_init__(self) -> None:
        count = 4 if self.attributes["shared"] else 2
        self.layers = [humming_nvfp4(*self.tensors[4 * i : 4 * i + 4]) for i in range(count)]
        activation = Activation(self.attributes["activation"])
        alpha, limit = self.attributes["alpha"], self.attributes["limit"]

        @torch.compile(dynamic=False, fullgraph=True)
        def activate(product: torch.Tensor) -> torch.Tensor:
            both = product.float()
            return gate(activation, both[:, 0::2], both[:, 1::2], alpha, limit).to(product.dtype)

        self.activate = activate

    def __call__(
        self, kind: str, inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[Work, Callable[[], torch.Tensor]]:
        """The work over all inputs (x, experts [tokens, top_k], weights [tokens, top_k]), and the last one's y once it
        has run."""
        up, down, *shared = self.layers
        calls = [(x, self._routed(kind, up, down, x, experts)) for x, experts, _ in inputs]
        last: dict[str, torch.Tensor] = {}

        def work() -> None:
            for x, routed in calls:
                last["routed"] = routed()
                if shared:
                    last["shared"] = shared[1](self.activate(shared[0](x)))

        def output() -> torch.Tensor:
            _, experts, weights = inputs[-1]
            pairs = last["routed"].float()
            if kind == "grouped_contiguous":
                pairs = torch.empty_like(pairs).index_copy(0, _order(experts), pairs)
            y = (pairs.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
            return y + last["shared"].float() if shared else y

        return work, output

    def _routed(
        self, kind: str, up: Any, down: Any, x: torch.Tensor, experts: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Outputs of the pairs: in order of token and rank (indexed), or sorted by expert."""
        top_k = experts.shape[1]
        rows = x if kind == "indexed" else x[_order(experts) // top_k]
        of_up = self._arguments(kind, up, experts)
        of_down = self._arguments(kind, down, experts)
        return lambda: down(self.activate(up(rows, top_k=top_k, **of_up)), **of_down)

    def _arguments(self, kind: str, layer: Any, experts: torch.Tensor) -> dict[str, Any]:
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        count = self.tensors[0].shape[0]
        tuning = get_heuristics_config(layer.humming_config, shape_m=experts.numel(), gemm_type=kind)
        _, layout, sorted_ids, expert_ids, padded = generate_moe_tensors(
            experts.int(), count, kind, tuning["block_shape"][0]
        )
        return {
            "expert_layout": layout,
            "sorted_ids": sorted_ids,
            "expert_ids": expert_ids,
            "num_tokens_padded": padded,
            "compute_config": {"gemm_type": kind},
            "tuning_config": tuning,
        }


def _order(experts: torch.Tensor) -> torch.Tensor:
    """Pairs sorted by expert."""
    return experts.flatten().argsort(stable=True)
