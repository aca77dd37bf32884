"""Residual channels where they are worth most, at the cost of as many everywhere.

Each subgraph is measured alone, as accuracy budgets do, on a part of the calibration text: what its 4-bit activations
with 0, 32 and 64 residual channels make of the model's last hidden states. The row of mixes is that of budgets too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.accuracy.quantizing import quantized_activations
from benchmarks.accuracy.subjects import Subject
from trt_nvfp4.builder.accuracy.precision_search import Option, mixes_by_cost
from trt_nvfp4.calibration.recipes import InputStatistics
from trt_nvfp4.graph_passes.lowerings.decision import Decision

COUNTS = (0, 32, 64)
BATCHES = 4


def residual_by_need(
    subject: Subject, statistics: dict[str, InputStatistics], scale_search: int, mean: int
) -> dict[str, int]:
    """Residual channels by subgraph that together add no more columns of weights than `mean` for each."""
    rows: dict[str, int] = {}
    for site in subject.sites:
        rows[site.subgraph] = rows.get(site.subgraph, 0) + len(site.weight)
    expected = subject.calibrate(BATCHES)

    def loss(name: str, count: int) -> float:
        residual = dict.fromkeys(rows, 0) | {name: count}
        alone = quantized_activations(
            subject, statistics, scale_search, residual, left=lambda site: site.subgraph != name
        )
        with alone:
            return _error(subject.calibrate(BATCHES), expected)

    options = {
        name: [Option(Decision.NVFP4_W4A4, float(count * rows[name]), loss(name, count), 0.0) for count in COUNTS]
        for name in rows
    }
    limit = mean * sum(rows.values())
    mixes = [mix for mix in mixes_by_cost(options) if sum(option.seconds for option in mix.values()) <= limit]
    return {name: int(option.seconds) // rows[name] for name, option in mixes[-1].items()}


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    differences = torch.stack([(a - b).double().square().sum() for a, b in zip(found, expected, strict=True)])
    return float(differences.sum() / torch.stack([b.double().square().sum() for b in expected]).sum())
