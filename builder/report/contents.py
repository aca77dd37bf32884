"""What the parts of OUT.report.json hold, as they are written and read back. Bytes, seconds and microseconds (`_us`).

A float that JSON has no number for, infinite or not a number, is None.
"""

from __future__ import annotations

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
    """What the network computes in outside of replaced subgraphs (see `Activations`): its `type`, and the nodes that
    stay `float32` by reason. Of an engine, also the products that it computes in float32."""

    float32_products: list[str]


class ExportOptions(TypedDict):
    """How a Hugging Face directory was exported: `task` is generate or features; of the first, sizes of the caches;
    `adapter`: as --adapter takes it."""

    task: str
    cache_capacity: int | None
    max_batch: int
    all_logits: bool
    adapter: str | None


class PluginWeights(TypedDict):
    """Of an engine without the plugins' weights: the file beside it that holds them."""

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
    """The least times that `gpu` allows for, by its published peaks (see `roofline.Limits`); `of`: what the subgraphs
    are of the whole model. Of a decoder `subgraphs` are of a decode step, and `prefill` of a prompt."""

    prefill: list[Prediction]


class TokenBytes(TypedDict):
    """Bytes read for one token of one sequence: `quantized` weights by decision, those `kept` in the model's type by
    subgraph, and the caches of `cache_tokens` tokens. `at_most` is tokens per second at the GPU's published bandwidth,
    with everything read once and nothing else done: a bound, and no prediction of a speed."""

    gpu: str
    quantized: dict[str, float]
    kept: dict[str, float]
    cache_tokens: int
    cache_bytes: float
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
    not; or why it is `not_measured`. `network`: what 16 bits alone do to a float32 network. `steps`: of a decoder."""

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


class BudgetOutcome(TypedDict):
    """What an accuracy budget led to: the `metric` of the chosen mix on held-out samples, and what was weighed."""

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
