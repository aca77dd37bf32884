"""One decode step of a language model with random weights: by this project's plugins and by torch.

Layers are RMSNorm, QKV, attention over the cache, output projection, residual, RMSNorm, gated MLP or mixture of
experts, residual; behind them a norm and the head. All take the same weights and caches.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.contestants import Weight, plugin_call, plugin_linear, stack_inputs
from trt_nvfp4.builder.bench.timing import Work
from trt_nvfp4.graph_passes.planning.kinds.products import experts_touched
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.definition import ACTIVATION_SCALES

EPSILON = 1e-6
BYTES_PER_WEIGHT = 0.5 + 1 / 16
LAUNCH_TACTIC = 11  # docs/figures/tactics.md


@dataclass(frozen=True)
class Shape:
    """A language model's sizes; `experts` 0: a gated MLP in each layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: int = 1
    experts: int = 0
    top_k: int = 0
    activation: Activation = Activation.SILU
    rotary: int | None = None  # channels of a head that are rotated; None: all, 0: no rotary embedding

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def weights(self, batch: int) -> float:
        """Weights that a step of `batch` tokens reads, the head's among them."""
        mlps = experts_touched(self.experts, self.top_k, batch) if self.experts else 1
        attention = (self.qkv + self.heads * self.head_dim) * self.hidden
        return self.layers * (attention + mlps * 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    def cached(self, batch: int, length: int) -> int:
        """Cached keys and values that a step reads."""
        return 2 * self.layers * batch * self.kv_heads * self.head_dim * length


SHAPES = {
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151936),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "Llama-3.1-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256, qk_norm=0),
    "Gemma-2B": Shape(18, 2048, 16384, 8, 1, 256, 256000, qk_norm=0, activation=Activation.GELU_TANH),
    "Qwen3-30B-A3B": Shape(48, 2048, 768, 32, 4, 128, 151936, experts=128, top_k=8),
}


@dataclass
class Layer:
    qkv: Weight
    output: Weight
    up: Weight | None = None  # rows 2i and 2i + 1 are gate i and up i
    down: Weight | None = None
    router: Tensor | None = None
    experts: list[Tensor] = field(default_factory=list)  # as NVFP4MoE takes them


@dataclass
class Model:
    """Random weights of a shape in NVFP4 and, but for experts, in `dtype`."""

    shape: Shape
    dtype: torch.dtype
    layers: list[Layer]
    head: Weight

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype) -> "Model":
        def layer() -> Layer:
            attention = (
                Weight.random(shape.qkv, shape.hidden, dtype),
                Weight.random(shape.hidden, shape.heads * shape.head_dim, dtype),
            )
            if shape.experts:
                router = torch.randn(shape.experts, shape.hidden, device="cuda", dtype=dtype) / shape.hidden**0.5
                experts = random_experts(shape.experts, shape.hidden, shape.intermediate, dtype)
                return Layer(*attention, router=router, experts=experts)
            up = Weight.random(2 * shape.intermediate, shape.hidden, dtype)
            return Layer(*attention, up, Weight.random(shape.hidden, shape.intermediate, dtype))

        layers = [layer() for _ in range(shape.layers)]
        return cls(shape, dtype, layers, Weight.random(shape.vocabulary, shape.hidden, dtype))

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device="cuda", dtype=self.dtype)


def random_experts(
    experts: int, hidden: int, intermediate: int, dtype: torch.dtype, gated: int = 1, shared: int = 0
) -> list[Tensor]:
    """NVFP4MoE's inputs from gate_up_weight to shared_gate; scales of one value. `shared`: the shared expert's
    intermediate size, 0: none."""

    def projection(lead: tuple[int, ...], n: int, k: int) -> list[Tensor]:
        scales = torch.full((*lead, -(-n // 128) * 128, -(-k // 64) * 4), 1.0, device="cuda").to(torch.float8_e4m3fn)
        packed = torch.randint(-128, 128, (*lead, n, k // 2), dtype=torch.int8, device="cuda")
        tensor_scale = torch.full(lead, 0.3 / k**0.5, device="cuda")
        return [packed, scales.view(torch.int8), tensor_scale, torch.zeros(*lead, n, device="cuda", dtype=dtype)]

    def mlp(lead: tuple[int, ...], channels: int) -> list[Tensor]:
        return [*projection(lead, (1 + gated) * channels, hidden), *projection(lead, hidden, channels)]

    shared_gate = torch.zeros(hidden, device="cuda", dtype=dtype)
    return [*mlp((experts,), intermediate), *mlp((), shared or 16), shared_gate]  # the op takes one where it uses none


@dataclass
class Step:
    """The inputs of a step: hidden states of its tokens, caches, lengths and rotary tables."""

    x: Tensor  # [batch, tokens, hidden]
    caches: Tensor  # [layers, 2, batch, kv_heads, capacity, head_dim]
    past_length: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def random(cls, model: Model, batch: int, length: int, fp8: bool, tokens: int = 1) -> "Step":
        """`length`: cached tokens behind the step."""
        shape = model.shape
        sizes = (2, batch, shape.kv_heads, length, shape.head_dim)
        caches = torch.empty((shape.layers, *sizes), device="cuda", dtype=torch.int8 if fp8 else model.dtype)
        for layer in caches:  # one at a time: temporaries are as large
            values = torch.randn(sizes, device="cuda", dtype=model.dtype)
            layer.copy_((values * 64).to(torch.float8_e4m3fn).view(torch.int8) if fp8 else values)
        angles = torch.rand(length, (shape.rotary or shape.head_dim) // 2, device="cuda") * 6
        x = torch.randn(batch, tokens, shape.hidden, device="cuda", dtype=model.dtype)
        return cls(x, caches, torch.full((batch,), length - tokens, device="cuda"), angles.cos(), angles.sin())


Calls = list[tuple[str, Work]]  # by part, in the order in which they run


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), EPSILON).to(x.dtype)


@torch.compile(dynamic=False)
def norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(rms_norm(x, weight))


@torch.compile(dynamic=False)
def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(x + y)


@torch.compile(dynamic=False)
def route(x: Tensor, y: Tensor, weight: Tensor, router: Tensor, both: Tensor, normed: Tensor, logits: Tensor) -> None:
    both.copy_(x + y)
    normed.copy_(rms_norm(both, weight))
    logits.copy_(functional.linear(normed, router))


def composed(host: PluginHost, model: Model, step: Step) -> tuple[Calls, Tensor]:
    """The step by plugins, and by compiled torch what lies between them; its calls, and the logits that they make."""
    shape, ones, x = model.shape, model.ones(model.shape.hidden), step.x
    calls: Calls = []
    for layer, caches in zip(model.layers, step.caches, strict=True):
        normed = torch.empty_like(x)
        calls.append(("norms", partial(norm, x, ones, normed)))
        call, qkv = plugin_linear(host, normed, layer.qkv)
        calls.append(("qkv", call))
        call, attended = attention(host, model, step, qkv, caches)
        calls.append(("attention", call))
        call, projected = plugin_linear(host, attended, layer.output)
        calls.append(("output", call))
        both = torch.empty_like(x)
        if layer.router is not None:
            normed, logits = torch.empty_like(x), torch.empty(*x.shape[:2], shape.experts, device="cuda")
            arguments = (x, projected, ones, layer.router, both, normed, logits)
            calls.append(("residual, norm and router", partial(route, *arguments)))
            call, y = plugin_call(host, "NVFP4MoE", moe_inputs(layer.experts, normed, logits), _routing(shape))
            calls.append(("mlp", call))
            x = torch.empty_like(both)
            calls.append(("residuals", partial(add, both, y, x)))
        else:
            calls.append(("residuals", partial(add, x, projected, both)))
            call, x = plugin_call(host, "NVFP4PersistentMLP", _mlp_inputs(both, layer), _mlp_attributes(shape))
            calls.append(("mlp", call))
    normed = torch.empty_like(x)
    calls.append(("norms", partial(norm, x, ones, normed)))
    call, logits = plugin_linear(host, normed, model.head)
    return [*calls, ("head", call)], logits


def attention(host: PluginHost, model: Model, step: Step, qkv: Tensor, caches: Tensor) -> tuple[Work, Tensor]:
    """CachedAttention, in place; `caches` [2, batch, kv_heads, capacity, head_dim]."""
    shape, (key, value) = model.shape, caches.unbind()
    scales = torch.full((2, shape.kv_heads), 1 / 64, device="cuda").unbind()
    ones = model.ones(shape.head_dim)
    sinks = torch.zeros(shape.heads, device="cuda")
    inputs = [qkv, key, value, step.past_length, step.cos, step.sin, ones, ones, sinks, *scales]
    attributes = {
        "heads": shape.heads,
        "rope": int(shape.rotary != 0),
        "qk_norm": shape.qk_norm,
        "fp8_cache": int(key.dtype == torch.int8),
    }
    return plugin_call(host, "CachedAttention", inputs, attributes, in_place=(key, value))


def one_launch(host: PluginHost, model: Model, step: Step) -> tuple[Calls, Tensor] | None:
    """The layers as one launch of NVFP4Decoder or NVFP4MoEDecoder, whatever AUTO takes, then norm and head; None where
    that serves no such step."""
    shape, layers = model.shape, model.layers
    op = "NVFP4MoEDecoder" if shape.experts else "NVFP4Decoder"
    dense = ("qkv", "output") if shape.experts else ("qkv", "output", "up", "down")
    weights = {name: [getattr(layer, name) for layer in layers] for name in dense}
    per_layer: dict[str, Tensor] = {
        **dict.fromkeys(("attention_norm_weight", "mlp_norm_weight"), model.ones(shape.hidden).repeat(len(layers), 1)),
        **dict.fromkeys(("q_norm_weight", "k_norm_weight"), model.ones(shape.head_dim).repeat(len(layers), 1)),
        **dict.fromkeys(("key_scale", "value_scale"), torch.full((len(layers), shape.kv_heads), 1 / 64, device="cuda")),
    }
    for name, matrices in weights.items():
        per_layer[f"{name}_weight"] = torch.stack([w.packed for w in matrices])
        per_layer[f"{name}_scales"] = torch.stack([w.block_scales for w in matrices])
        per_layer[f"{name}_tensor_scale"] = torch.stack([w.tensor_scale for w in matrices])
        per_layer[f"{name}_bias"] = torch.stack([w.bias for w in matrices]).to(model.dtype)
    if shape.experts:
        per_layer["router_weight"] = torch.stack([layer.router for layer in layers if layer.router is not None])
        ports = [f"{name}_{part}" for name in ("up", "down") for part in ("weight", "scales", "tensor_scale", "bias")]
        per_layer |= {port: torch.stack([layer.experts[at] for layer in layers]) for at, port in enumerate(ports)}
    given = {"x": step.x, "past": step.caches, "past_length": step.past_length, "cos": step.cos, "sin": step.sin}
    inputs = [(given | per_layer)[formal.name].contiguous() for formal in OPS[op].inputs]
    attributes: dict[str, int | float] = {
        "heads": shape.heads,
        "rope": 1,
        "qk_norm": shape.qk_norm,
        "fp8_cache": int(step.caches.dtype == torch.int8),
        "activation": int(shape.activation),
        "epsilon": EPSILON,
    }
    if shape.experts:
        attributes |= _routing(shape)
    with host.session(op, inputs, attributes) as automatic:
        if LAUNCH_TACTIC not in automatic.tactics:
            return None
    session = host.session(op, inputs, attributes, tactic=LAUNCH_TACTIC)
    y, normed = torch.empty_like(step.x), torch.empty_like(step.x)
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
    call, logits = plugin_linear(host, normed, model.head)
    return [
        ("layers", lambda: session.enqueue(inputs, [y, step.caches], workspace)),
        ("norms", partial(norm, y, model.ones(shape.hidden), normed)),
        ("head", call),
    ], logits


def _mlp_inputs(x: Tensor, layer: Layer) -> list[Tensor]:
    assert layer.up is not None
    assert layer.down is not None
    return stack_inputs(x, [layer.up], [layer.down])


def _mlp_attributes(shape: Shape) -> dict[str, int | float]:
    return {"activation": int(shape.activation), "norm": 1, "residual": 1, "epsilon": EPSILON}


def moe_inputs(experts: list[Tensor], x: Tensor, logits: Tensor) -> list[Tensor]:
    scales = [torch.zeros((), device="cuda") for formal in OPS["NVFP4MoE"].inputs if formal.name in ACTIVATION_SCALES]
    return [x, logits, torch.zeros(logits.shape[-1], device="cuda"), *experts, *scales]


def _routing(shape: Shape) -> dict[str, int | float]:
    return {"top_k": shape.top_k, "renormalize": 1}


class Dense:
    """The step in 16 bits, or with FP8 weights and activations by torch._scaled_mm, under torch.compile; attention is
    torch's scaled_dot_product_attention over the cached length, whose kernels torch.compile takes as they are.

    Compiled once for a batch; lengths may vary.
    """

    def __init__(self, model: Model, batch: int, fp8: bool) -> None:
        self._shape, self._batch = model.shape, batch
        self._rows = 16 if fp8 else batch  # _scaled_mm takes rows in sixteens
        shape, ones, head_ones = model.shape, model.ones(model.shape.hidden), model.ones(model.shape.head_dim)
        one = torch.ones((), device="cuda")

        def prepared(weight: Weight | None) -> Tensor:
            assert weight is not None
            return weight.dense.to(torch.float8_e4m3fn) if fp8 else weight.dense

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            if not fp8:
                return functional.linear(x, weight)
            return torch._scaled_mm(x.to(weight.dtype), weight.t(), one, one, out_dtype=x.dtype, use_fast_accum=True)

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

        def before(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            by_head = linear(rms_norm(x, ones), weight)[:batch].view(batch, -1, shape.head_dim)
            q, k, v = by_head.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            if shape.qk_norm:
                q, k = rms_norm(q, head_ones), rms_norm(k, head_ones)
            return rotated(q, cos, sin), rotated(k, cos, sin), v.contiguous()

        def behind(x: Tensor, attended: Tensor, output: Tensor, up: Tensor, down: Tensor) -> Tensor:
            x = x + linear(functional.pad(attended, (0, 0, 0, self._rows - batch)), output)
            gate, both = linear(rms_norm(x, ones), up).chunk(2, -1)
            is_silu = shape.activation == Activation.SILU
            hidden = functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")
            return x + linear(hidden * both, down)

        def last(x: Tensor, head: Tensor) -> Tensor:
            return linear(rms_norm(x, ones), head)

        self._before, self._behind, self._last = (torch.compile(f, dynamic=False) for f in (before, behind, last))
        self._weights = [tuple(map(prepared, (w.qkv, w.output, w.up, w.down))) for w in model.layers]
        self._head = prepared(model.head)

    def step(self, step: Step, length: int) -> Work:
        """The call for these caches. The new keys and values are copied to the last place of the length."""
        batch, shape = self._batch, self._shape
        cos, sin = (table[length - 1][None, None] for table in (step.cos, step.sin))

        def work() -> Tensor:
            x = functional.pad(step.x.view(batch, -1), (0, 0, 0, self._rows - batch))
            for (qkv, output, up, down), (keys, values) in zip(self._weights, step.caches, strict=True):
                q, k, v = self._before(x, qkv, cos, sin)
                keys[:, :, length - 1], values[:, :, length - 1] = k, v
                attended = functional.scaled_dot_product_attention(
                    q[:, :, None], keys[:, :, :length], values[:, :, :length], enable_gqa=shape.heads != shape.kv_heads
                )
                x = self._behind(x, attended.reshape(batch, -1), output, up, down)
            return self._last(x, self._head)

        return work
