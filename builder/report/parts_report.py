"""What building a model of parts came to: components.report.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from trt_nvfp4.builder.parallel.prediction import RanksPrediction
from trt_nvfp4.builder.report.report import Report


@dataclass
class PartsReport:
    """What building a model of parts came to. `chain`: agreement of the rewritten parts with the original."""

    model: str
    target: str
    folder: str
    parts: dict[str, Report] = field(default_factory=dict)
    chain: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    #: Of a model that is split: whether that pays (see `parallel.prediction`).
    ranks: RanksPrediction | None = None

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str)
