"""Random weights that 4 bits hold exactly, so that what a plan computes can be compared with the original closely."""

from pathlib import Path
from typing import Any

import torch

import trt_nvfp4

_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def in_four_bits(model: torch.nn.Module) -> None:
    """Give linears weights that NVFP4 holds: of one scale, which each block of 16 reaches."""
    for module in model.modules():
        # An exporter may store equal zero tensors of many layers as one.
        if isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0 and module.weight.any():
            drawn = _VALUES[torch.randint(len(_VALUES), module.weight.shape)]
            drawn[:, ::16] = 6
            module.weight.data = drawn * (torch.randint(2, drawn.shape) * 2 - 1) / 16


def built(model: Path, folder: Path, least: int, exclude: str | None = None, **options: Any) -> str:
    """Builds an engine for rtx-blackwell, in which `least` subgraphs or more are planned, all of them plugin layers of
    4-bit weights; returns the rewritten model of the same plan with float32 activations."""
    plan: dict[str, Any] = {"target": "rtx-blackwell", "kinds": ("gated_mlp", "mlp", "linear"), "precision": "nvfp4"}
    plan |= {"accuracy_samples": 0, "exclude": exclude}
    result = trt_nvfp4.build(model, output=folder / "m.engine", **plan, **options)
    planned = [subgraph for subgraph in result.subgraphs if subgraph.decision != "keep"]
    assert len(planned) >= least
    assert {(each.decision, each.realized) for each in planned} == {("nvfp4_w4a16", "nvfp4 plugin")}
    assert result.report.plugin_layers == len(planned)
    source = result.files.get("exported model", model)
    twin = trt_nvfp4.build(source, output=folder / "twin.engine", activations="keep", stop_after="rewrite", **plan)
    assert [each.decision for each in twin.subgraphs] == [each.decision for each in result.subgraphs]
    return str(twin.files["rewritten model"])
