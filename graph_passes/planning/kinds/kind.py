"""The interface of every kind of subgraph."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph, has_ranges
from trt_nvfp4.graph_passes.planning.selection import Selection
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

#: Bytes of a value, and the type that tensor cores multiply in, where a decision leaves the model's own type; float32
#: is multiplied as TF32.
KEPT = {"float32": (4.0, "tf32"), "float16": (2.0, "bf16"), "bfloat16": (2.0, "bf16")}

Decided: TypeAlias = tuple[Decision, Reason]


@dataclass(frozen=True)
class PlanOptions:
    """How subgraphs are to be computed.

    Attributes:
        precision: "auto" and "nvfp4" take NVFP4 where it serves, then FP8, then 16 bits; "fp8" and "bf16" start there;
            "native-nvfp4" takes TensorRT's own NVFP4 layers instead of plugins.
        kinds: those to replace, DEFAULT_KINDS by default; the rest is kept, and so is what was put in by hand. They do
            not select attention, and the products in layers of kind "decoder" need not be named.
        include, exclude: regular expressions searched in the subgraph's name and its nodes' names.
        calibrated: activation statistics will be at hand, so that 4-bit activations get calibrated scales; or of which
            tensors.
        recipe: how NVFP4 weights are made.
        moe: "plugin", or "trt_moe": TensorRT's own MoE layer where target and block have it, else as for "plugin".
        tokens: by subgraph name, the rows of its input at the opt shapes. Where they are many, "auto" takes FP8 first
            on a target without FP4, and W4A4 without calibration data on one with it.
        attention: "auto", "plugin" or "tensorrt".
        kv_cache: "auto", or the type of the caches.
        checkpoint: where weights will be taken from, byte by byte.
        keeps_edges: the model is a denoiser, whose first and last products stay as they are.
    """

    precision: str = "auto"
    kinds: Collection[str] | None = None
    include: str | None = None
    exclude: str | None = None
    calibrated: bool | Collection[str] = False
    recipe: str = "max"
    moe: str = "plugin"
    tokens: Mapping[str, int] | None = None
    attention: str = "auto"
    kv_cache: str = "auto"
    checkpoint: NVFP4Checkpoint | None = None
    keeps_edges: bool = False


@dataclass(frozen=True)
class PlanContext:
    """The inputs of decisions beside the subgraph. `subgraphs`: the model's, by name; `edges`: why some of them stay as
    they are."""

    options: PlanOptions
    capabilities: Capabilities
    selection: Selection
    subgraphs: Mapping[str, Subgraph]
    edges: Mapping[str, str] = field(default_factory=dict)

    def has_ranges(self, subgraph: Subgraph) -> bool:
        """Whether there will be statistics of the subgraph's inputs."""
        return has_ranges(subgraph, self.options.calibrated)


@dataclass(frozen=True)
class KernelClass:
    """`name`: "W4A4", "W4A16", "FP8", "TensorRT" (its own layers) or "generic"; `why`, and what to do about it where
    the kernels are slow ones (`remedy`, "" elsewhere)."""

    name: str
    why: str
    remedy: str = ""

    @property
    def is_generic(self) -> bool:
        """Correct and slow: no tensor cores."""
        return self.name == "generic"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Gemm:
    """`count` products x[m, k] @ W[n, k]^T, each with a weight of its own."""

    n: int
    k: int
    count: int = 1


@dataclass(frozen=True)
class Work:
    """The least work of a launch: `bytes` to read and write, `operations` (a multiply-add is two) of operand type
    `arithmetic`, and `decoded` 4-bit weights to decode for `rows` rows each."""

    bytes: float
    operations: float
    arithmetic: str
    decoded: float = 0.0
    rows: int = 0


class Kind(ABC):
    """One kind of subgraph. Its methods take what a plan's entry holds, so that they serve plans of other days too.

    Attributes:
        subgraph: the class of its subgraphs, with the payload.
        selection: how `--kinds` selects it: by default, with "all", only by its name; "always" where it does not.
        has_weights: whether it multiplies by weights, whose format `--require` can ask for.
        caches_tokens: whether it reads a cache that grows with the tokens.
        is_whole_layer: whether it holds subgraphs that are planned too.
        unselected_in_reports: whether reports list, count or hide its subgraphs that `--kinds` does not select.
    """

    subgraph: ClassVar[type[Subgraph]]
    selection: ClassVar[Literal["default", "all", "named", "always"]]
    has_weights: ClassVar[bool] = True
    caches_tokens: ClassVar[bool] = False
    is_whole_layer: ClassVar[bool] = False
    unselected_in_reports: ClassVar[Literal["list", "count", "hide"]] = "list"

    @property
    def name(self) -> str:
        """In plan files, reports and `--kinds`."""
        return self.subgraph.kind

    @abstractmethod
    def decide(self, subgraph: Any, context: PlanContext) -> dict[str, Decided]:
        """Decision and reason of a subgraph, by name, and of others that this fixes."""

    def choices(
        self, subgraph: Any, planned: Decision, capabilities: Capabilities, precision: str, kv_cache: str
    ) -> list[Decision]:
        """The decisions that an accuracy budget may choose, best first, for a subgraph that is `planned` so far, with
        calibration data. Empty where the subgraph has the precision of its parts."""
        return []

    def kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass | None:
        """The kernels of a replaced subgraph; None where they are unknown."""
        return None

    def conflict(self, entry: PlannedSubgraph, subgraph: Any, plan: Sequence[PlannedSubgraph]) -> str | None:
        """Why an entry cannot be carried out together with the rest of `plan`; None where it can."""
        return None

    def covered_by(self, entry: PlannedSubgraph, others: Sequence[PlannedSubgraph], require: str) -> bool:
        """Whether `others` of the plan have all of its weights in the format `require`."""
        return False

    def gemms(self, shapes: Mapping[str, int]) -> list[Gemm]:
        """Its dense products with weights."""
        return []

    def weights(self, shapes: Mapping[str, int], tokens: int, residual: int = 0) -> tuple[float, float]:
        """(weights that are read for `tokens` rows, weights that each row is multiplied by), with `residual` more
        columns each."""
        dense = float(sum(gemm.n * (gemm.k + residual) * gemm.count for gemm in self.gemms(shapes)))
        return dense, dense

    def stored_weights(self, shapes: Mapping[str, int]) -> float:
        """All its weights."""
        return self.weights(shapes, 1)[0]

    def work(
        self, shapes: Mapping[str, int], decision: Decision, tokens: int, dtype: str, residual: int = 0
    ) -> list[Work]:
        """Its launches, one after another, for `tokens` rows of input of `dtype`; empty where nothing is predicted.
        `residual`: channels that 4-bit activations have twice."""
        return []
