"""The report of building a model of parts: components.report.json."""

import json
from dataclasses import asdict, dataclass, field

from trt_nvfp4.builder.parallel.prediction import RanksPrediction
from trt_nvfp4.builder.report.report import Report


@dataclass
class PartsReport:
    """The outcome of building a model of parts. `chain`: agreement of the rewritten parts with the original."""

    model: str
    target: str
    folder: str
    parts: dict[str, Report] = field(default_factory=dict)
    chain: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    #: Largest error of each joint's actions of a robot policy, in the robot's units.
    joints: dict[str, float] = field(default_factory=dict)
    #: Whether splitting a model over GPUs pays (see `parallel.prediction`).
    ranks: RanksPrediction | None = None

    def take_warnings(self) -> None:
        """Add the warnings of the parts, each once, behind the names of the parts that it is about. A part without
        subgraphs, such as an embedding, has nothing to be warned of."""
        about: dict[str, list[str]] = {}
        for name, part in self.parts.items():
            for text in part.warnings if part.subgraphs else ():
                about.setdefault(text, []).append(name)
        self.warnings += [f"{', '.join(names)}: {text}" for text, names in about.items()]

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str)
