"""The state of a build, which goes from step to step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from trt_nvfp4.builder.accuracy.precision_search import Draft
from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory
from trt_nvfp4.builder.inputs.shapes import Profiles
from trt_nvfp4.builder.model.model import Model
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.terminal.progress import Progress
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass(repr=False)
class Run:
    """One build: the request, and what is known of the model so far. Each step takes it and fills in its results; a
    field without a value belongs to a step that has not run."""

    request: Request
    report: Report
    progress: Progress
    #: The content of the given file; None for a directory.
    given: onnx.ModelProto | None
    #: The model to build, once there is one the rewritten model; and as it was before surgery.
    model: Model = field(init=False)
    original: Model = field(init=False)
    #: The model's graph, normalized and in the types that the engine computes in.
    network: SourceModel = field(init=False)
    profiles: list[Profiles] = field(init=False)
    subgraphs: Sequence[Subgraph] = field(init=False)
    #: Where NVFP4 weights are taken from.
    checkpoint: NVFP4Checkpoint | None = None
    #: The quantized weights of the model's directory.
    published: QuantizedDirectory | None = None
    #: True if there will be statistics of activations, or the tensors whose ranges are known.
    calibrated: bool | Collection[str] = False
    #: Rows of each subgraph in the shapes that the engine is tuned for; a decoder's in a decode step and in a prompt.
    tokens: Mapping[str, int] = field(init=False)
    prefill: Mapping[str, int] | None = None
    plan: Plan = field(init=False)
    statistics: Statistics | None = None

    def draft(self) -> Draft:
        """The plan as something to choose precisions for."""
        return Draft(
            self.network,
            self.subgraphs,
            self.plan,
            self.statistics,
            self.request.target,
            self.tokens,
            self.request.require,
            self.request.kv_cache,
            self.checkpoint,
        )

    def release(self, rewritten: Model) -> None:
        """Go on with the rewritten model, and forget what it was made of: the build needs the memory."""
        self.model = self.original = rewritten
        del self.network, self.subgraphs
        self.given = None
