"""The same linears and MLP stacks computed by this project's plugins and by others.

Only the plugins add biases, so that a deep stack's values neither fade nor overflow; the others do less work.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from trt_nvfp4.builder.bench.timing import Work
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation
from trt_nvfp4.plugins.ops.number_formats import e2m1_decode, tile_scales, unpack, untile_scales


@dataclass(frozen=True)
class Weight:
    """Random NVFP4 weights [n, k], as the ops take them, and as 16-bit values for the others."""

    packed: torch.Tensor  # int8 [n, k/2]
    block_scales: torch.Tensor  # int8, the E4M3 bytes tiled
    tensor_scale: torch.Tensor  # float32 []
    dense: torch.Tensor  # [n, k]
    scales: torch.Tensor  # float8_e4m3fn [n, k/16]
    bias: torch.Tensor  # bfloat16 [n]; keeps a deep stack's values near one

    def exact(self) -> torch.Tensor:
        """float64 [n, k]."""
        codes = e2m1_decode(unpack(self.packed.view(torch.uint8))).double()
        return codes * (self.scales.double() * self.tensor_scale.double()).repeat_interleave(16, dim=1)

    @classmethod
    def random(cls, n: int, k: int, dtype: torch.dtype) -> "Weight":
        packed = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, device="cuda")
        scales = (0.5 + 1.5 * torch.rand(n, k // 16, device="cuda")).to(torch.float8_e4m3fn)
        # Random codes have a root mean square of 2.8, the scales of 1.3: outputs near one.
        tensor_scale = torch.tensor(1.0 / (3.7 * math.sqrt(k)), device="cuda")
        codes = e2m1_decode(unpack(packed.view(torch.uint8))).to(dtype)
        dense = codes * (scales.float() * tensor_scale).to(dtype).repeat_interleave(16, dim=1)
        bias = (0.25 * torch.randn(n, device="cuda")).bfloat16()
        return cls(packed, tile_scales(scales).view(torch.int8), tensor_scale, dense, scales, bias)


def in_turn(calls: list[Work]) -> Work:
    """All of them, one after another."""
    return lambda: [call() for call in calls]


def plugin_linear(host: PluginHost, x: torch.Tensor, weight: Weight) -> tuple[Work, torch.Tensor]:
    """NVFP4Linear through the plugin host; returns the call and the tensor it writes."""
    weights = [weight.packed, weight.block_scales, weight.tensor_scale, weight.bias.to(x.dtype)]
    return plugin_call(host, "NVFP4Linear", [x, *weights, torch.zeros((), device="cuda")], {})


def stack_inputs(x: torch.Tensor, ups: list[Weight], downs: list[Weight]) -> list[torch.Tensor]:
    """NVFP4PersistentMLP's, of x [m, hidden] and a layer's up [rows, hidden] and down [hidden, intermediate] each."""
    inputs = [x, x.new_ones(len(ups), x.shape[-1])]
    for weights in (ups, downs):
        inputs += [torch.stack([w.packed for w in weights]), torch.stack([w.block_scales for w in weights])]
        inputs += [torch.stack([w.tensor_scale for w in weights]), torch.stack([w.bias for w in weights]).to(x.dtype)]
    return [*inputs, torch.zeros(len(ups), device="cuda"), torch.zeros(len(ups), device="cuda")]


def plugin_stack(
    host: PluginHost, x: torch.Tensor, ups: list[Weight], downs: list[Weight]
) -> tuple[Work, torch.Tensor]:
    """NVFP4PersistentMLP of gelu_tanh-gated layers, one launch."""
    attributes = {"activation": int(Activation.GELU_TANH), "gated": 1, "norm": 0, "residual": 0}
    return plugin_call(host, "NVFP4PersistentMLP", stack_inputs(x, ups, downs), attributes)


def plugin_layers(
    host: PluginHost, x: torch.Tensor, ups: list[Weight], downs: list[Weight]
) -> tuple[Work, torch.Tensor]:
    """The same kernel launched layer by layer."""
    calls = []
    for up, down in zip(ups, downs, strict=True):
        call, x = plugin_stack(host, x, [up], [down])
        calls.append(call)
    return in_turn(calls), x


def dense_stack(x: torch.Tensor, ups: list[Weight], downs: list[Weight], mode: str = "default") -> Work:
    """16-bit weights under torch.compile, in this mode. Rows 2i and 2i + 1 of an up weight are gate i and up i."""
    weights = [(_gate_first(up.dense), down.dense) for up, down in zip(ups, downs, strict=True)]

    # Beyond eight versions of a function it is no longer compiled, which this makes an error.
    @torch.compile(mode=mode, dynamic=False, fullgraph=True)
    def stack(x: torch.Tensor) -> torch.Tensor:
        for up, down in weights:
            gate, linear = functional.linear(x, up).chunk(2, dim=-1)
            x = functional.linear(functional.gelu(gate, approximate="tanh") * linear, down)
        return x

    return lambda: stack(x)


def fp8_stack(x: torch.Tensor, ups: list[Weight], downs: list[Weight], fast: bool = False) -> Work:
    """FP8 E4M3 weights and activations, ``torch._scaled_mm``, under torch.compile. It takes rows in sixteens.

    ``fast``: sums stay in the tensor cores' accumulators, which keep fewer bits than float32.
    """
    fp8, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    weights = [(_gate_first(u.dense).to(fp8).t(), d.dense.to(fp8).t()) for u, d in zip(ups, downs, strict=True)]
    padded = functional.pad(x, (0, 0, 0, -x.shape[0] % 16))

    @torch.compile(dynamic=False, fullgraph=True)
    def stack(x: torch.Tensor) -> torch.Tensor:
        for up, down in weights:
            both = torch._scaled_mm(x.to(fp8), up, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
            gate, linear = both.chunk(2, dim=-1)
            hidden = functional.gelu(gate, approximate="tanh") * linear
            x = torch._scaled_mm(hidden.to(fp8), down, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return x

    return lambda: stack(padded)


def humming_linear(x: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """humming-kernels with NVFP4 weights that it quantizes itself."""
    from humming.layer import HummingLayer

    config = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}
    n, k = weight.shape
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=x.dtype).cuda()
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer  # type: ignore[no-any-return]


def humming_nvfp4(
    packed: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, bias: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """humming-kernels on given NVFP4 weights: packed [n, k/2], tiled scales, tensor_scale [], bias [n]; of experts with
    a dimension in front."""
    from humming.layer import HummingLayer

    *experts, n, half = packed.shape
    layer = HummingLayer(
        shape_n=n,
        shape_k=2 * half,
        pad_n_to_multiple=128,  # which its kernels for Hopper need
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        num_experts=experts[0] if experts else None,
        has_bias=True,
        torch_dtype=bias.dtype,
    ).to(packed.device)
    tensors = {
        "weight": packed.view(torch.uint8),
        "weight_scale": untile_scales(scales.view(torch.float8_e4m3fn), n, half // 8),
        "weight_scale_2": tensor_scale.reshape(-1),
        "bias": bias,
    }
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer  # type: ignore[no-any-return]


def humming_stack(x: torch.Tensor, ups: list[Weight], downs: list[Weight]) -> Work:
    """Two humming linears per layer, the activation compiled."""
    layers = [
        (humming_linear(x, _gate_first(u.dense)), humming_linear(x, d.dense)) for u, d in zip(ups, downs, strict=True)
    ]

    @torch.compile(dynamic=False)
    def activation(both: torch.Tensor) -> torch.Tensor:
        gate, linear = both.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * linear

    def stack() -> torch.Tensor:
        y = x
        for up, down in layers:
            y = down(activation(up(y)))
        return y

    return stack


def int4_linear(x: torch.Tensor, weight: torch.Tensor) -> Work:
    """torch's int4 packed matmul, groups of 32; random codes, since only its speed is of interest. BF16 only."""
    n, k = weight.shape
    codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(codes, 8)
    scales = torch.ones(k // 32, n, 2, dtype=torch.bfloat16, device="cuda")
    return lambda: torch._weight_int4pack_mm(x, packed, 32, scales)


def _gate_first(up: torch.Tensor) -> torch.Tensor:
    return torch.cat([up[0::2], up[1::2]])


def plugin_call(
    host: PluginHost,
    op: str,
    inputs: list[torch.Tensor],
    attributes: Mapping[str, int | float | str],
    in_place: Sequence[torch.Tensor] = (),
) -> tuple[Work, torch.Tensor]:
    """The call, and the first output, which it makes; `in_place`: the others, which are inputs too."""
    session = host.session(op, inputs, attributes)
    shape, *_ = session.output_shapes(inputs)
    y = torch.empty(shape, dtype=inputs[0].dtype, device="cuda")
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
    return lambda: session.enqueue(inputs, [y, *in_place], workspace), y
