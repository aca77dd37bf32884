"""Types of the parts of OUT.report.json, in bytes, seconds and microseconds (`_us`).

Infinity and NaN, which JSON does not have, are None.
"""

from typing import TypedDict, final


class ReportedSubgraph(TypedDict):
    """A planned subgraph. `activations`: the type that they have in its products; `realized`: what the engine holds of
    it, None without an engine."""

    name: str
    kind: str
    nodes: list[str]
    shapes: dict[str, int]
    decision: str
    reason: str
    reason_code: str | None
    activations: str
    kernels: str
    residual_channels: int | None
    realized: str | None


class _PlannedNetwork(TypedDict):
    type: str
    note: str
    float32: dict[str, list[str]]


class Network(_PlannedNetwork, total=False):
    """Types outside of replaced subgraphs (see `Activations`): the network's `type`, and the nodes that stay `float32`
    by reason; for an engine, also the products that it computes in float32."""

    float32_products: list[str]


class _ExportOptions(TypedDict):
    task: str
    cache_capacity: int | None
    max_batch: int
    all_logits: bool
    adapter: str | None


class ExportOptions(_ExportOptions, total=False):
    """How a Hugging Face directory was exported: `task` is generate, text or features; of the first two, sizes of the
    caches; `adapter` and `draft`: as the options take them; `image_size` and `batch`: of exports without caches."""

    draft: str | None
    image_size: str | None
    batch: int | None


class PluginWeights(TypedDict):
    """The file beside a stripped engine that holds the plugins' weights."""

    file: str
    digest: str
    bytes: int
    tensors: int


@final
class Prediction(TypedDict):
    """The roofline of equal subgraphs: the cost as planned, and least microseconds by what computes them: "nvfp4" (as
    planned, whatever that is), "fp8" and "bf16"."""

    names: list[str]
    kind: str
    decision: str
    shapes: dict[str, int]
    tokens: int
    bytes: float
    operations: float
    bound: str
    predicted_us: dict[str, float]


class _Roofline(TypedDict):
    gpu: str
    bandwidth: float
    tflops: dict[str, float]
    source: str
    of: str
    subgraphs: list[Prediction]


class Roofline(_Roofline, total=False):
    """The least times that `gpu` allows for, by its published peaks (see `roofline.Limits`); `of`: the share
    of the subgraphs in the whole model. For decoders `subgraphs` describe a decode step, and `prefill` a prompt."""

    prefill: list[Prediction]


class TokenBytes(TypedDict):
    """Bytes read for one token of one sequence: `quantized` weights by decision, those `kept` in the model's type by
    subgraph, the caches of `cache_tokens` tokens, and states read and written. `at_most` is tokens per second at the
    GPU's published bandwidth,
    with everything read once and nothing else done: a bound, and no prediction of a speed."""

    gpu: str
    quantized: dict[str, float]
    kept: dict[str, float]
    cache_tokens: int
    cache_bytes: float
    state_bytes: float
    total: float
    at_most: float


class TensorAgreement(TypedDict):
    """How an output or a replaced subgraph agrees with the original's (see `Agreement`)."""

    name: str
    kind: str
    discrete: bool
    cosine: float | None
    sqnr_db: float | None
    max_abs: float | None
    max_rel: float | None
    argmax: float
    equal: float
    kl: float | None
    worst_sample: int


class StepAgreement(TypedDict):
    """How one generated token agrees (see `decoding.Step`)."""

    step: int
    kl: float
    kl_worst: float
    top1: float


class DecodingAgreement(TypedDict):
    """How two decoders agree over their caches, step by step."""

    reference: str
    result: str
    prompts: int
    kl: float
    top1: float
    steps: list[StepAgreement]


class Accuracy(TypedDict, total=False):
    """Agreement of the rewritten model with the original on `samples` samples, which were `held_out` of calibration or
    not; or why it is `not_measured`. `network`: the effect of 16 bits on a float32 network. `steps`: for decoders."""

    not_measured: str
    samples: int
    held_out: bool
    tensors: list[TensorAgreement]
    network: list[TensorAgreement]
    steps: DecodingAgreement


class WeighedPrecision(TypedDict):
    """One precision of one subgraph (see `precision_search.Option`)."""

    decision: str
    seconds: float
    loss: float | None
    value: float | None
    op: str
    worst_output: str
    residual_channels: int | None


class TriedMix(TypedDict):
    """A mix of precisions that was measured."""

    roofline_us: float
    achieved: float | None


class _BudgetOutcome(TypedDict):
    budget: str
    metric: str
    achieved: float | None
    worst_output: str
    held_out_samples: int
    choosing_samples: int
    predicted_loss: float | None
    roofline_us: float
    subgraphs: dict[str, list[WeighedPrecision]]
    tried: list[TriedMix]


class BudgetOutcome(_BudgetOutcome, total=False):
    """The outcome of an accuracy budget: the `metric` of the chosen mix on held-out samples, and the candidates."""

    #: What the original comes to on the same samples; None where a metric compares with it.
    original: float | None
