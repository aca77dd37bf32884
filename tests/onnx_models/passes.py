"""Planning and rewriting as most tests need it."""

from collections import Counter
from pathlib import Path

from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.mixed_precision.choose import choose
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, DEFAULT_KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import RewriteResult, rewrite
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

EVERYTHING = Capabilities("everything", nvfp4_w4a4=True, nvfp4_w4a16=True, fp8=True, bf16=True)


def found_mlps(model: SourceModel) -> list[Subgraph]:
    """The MLPs of a model, refused ones included."""
    return [subgraph for subgraph in find_subgraphs(model) if subgraph.kind != "linear"]


def replaceable(model: SourceModel) -> Counter[str]:
    """How many subgraphs of each kind can be replaced."""
    return Counter(subgraph.kind for subgraph in find_subgraphs(model) if subgraph.can_be_replaced)


def in_16_bits(model: SourceModel) -> SourceModel:
    """A float32 model as it is built by default."""
    return convert(model, choose(model, "auto"))


def plan_all(
    model: SourceModel, precision: str = "nvfp4", kinds: tuple[str, ...] = ALL_KINDS, **options: object
) -> Plan:
    """A plan for a target that can do everything."""
    return make_plan(model, find_subgraphs(model), EVERYTHING, PlanOptions(precision=precision, kinds=kinds, **options))  # type: ignore[arg-type]


def rewritten(model: SourceModel, plan: Plan | None = None, statistics: Statistics | None = None) -> RewriteResult:
    """The model rewritten by `plan` (all in NVFP4 with 16-bit activations), beside its source."""
    return rewrite(model, plan or plan_all(model), statistics, model.path.with_name("rewritten.onnx"))


def rewritten_file(model: Path) -> Path:
    """`o.rewritten.onnx` and `o.plan.yaml` beside an ONNX file, MLPs and MoE blocks with NVFP4 weights."""
    source = load(model)
    plan = plan_all(source, kinds=DEFAULT_KINDS)
    plan.save(model.with_name("o.plan.yaml"))
    return rewrite(source, plan, None, model.with_name("o.rewritten.onnx")).path
