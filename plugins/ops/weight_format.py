"""The formats of weights, and of what they are multiplied with, that an op may exist in: NVFP4 and E4M3."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.definition import QUANTIZATION_FLAGS, QUANTIZATION_RANGES, Formal, Shape, ShapeRule
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tiled_shape
from trt_nvfp4.plugins.ops.reference import dequantize_e4m3, dequantize_weight, gemm_input, linear, through_e4m3


@dataclass(frozen=True)
class WeightFormat:
    """How an op's projections are given, and computed.

    A weight's inputs are `<projection>_<part>`, its values first; `parts` gives their shapes for a weight [N, K]. Its
    bias follows. `values_per_byte` says how wide the values are, `scales` are the inputs that scale the op's input and
    its hidden activations, `flags` the attributes that only this format has, `ranges` those of them that are no 0 or 1.
    In Torch, `weight` makes [N, K] of the parts and `seen` what a product sees of float32 rows (rows, dtype, given
    scale, and the flags by name); `weight_onnx` and `seen_onnx` are their statements (y and the parts; y, rows and
    given scale), behind `constants` and `attributes_onnx`.
    """

    parts: Callable[[int, int], dict[str, Shape]]
    values_per_byte: int
    scales: tuple[Formal, Formal]
    weight: Callable[..., Tensor]
    seen: Callable[..., Tensor]
    constants: str
    weight_onnx: Callable[..., str]
    seen_onnx: Callable[[str, str, str], str]
    flags: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    attributes_onnx: str = ""

    @property
    def names(self) -> list[str]:
        """The parts."""
        return list(self.parts(BLOCK, BLOCK))

    @property
    def width(self) -> int:
        """The number of inputs of a projection."""
        return len(self.names) + 1

    def product(self, rows: Tensor, *projection: Tensor) -> Tensor:
        """rows W^T + b, of the inputs of a projection."""
        *parts, bias = projection
        return linear(rows, self.weight(*parts), bias)

    def decoded_onnx(self, y: str, projection: str) -> str:
        """Statements for y [N, K] float32, the weight of a projection."""
        return self.weight_onnx(y, *(f"{projection}_{part}" for part in self.names))

    def check(self, rule: ShapeRule, projection: str, k: int, batch: Shape = ()) -> int:
        """Check the inputs of a projection that reads `k` channels, but for its bias; return N."""
        k += rule.residual_channels(k)
        n = rule.weight(f"{projection}_weight", k, self.values_per_byte, batch)
        for part, shape in self.parts(n, k).items():
            rule.expect(f"{projection}_{part}", (*batch, *shape))
        return n

    def check_mlp(self, rule: ShapeRule, prefix: str, k: int, gated: bool, batch: Shape = ()) -> int:
        """Check the inputs of `<prefix>gate_up` and `<prefix>down` for inputs of K = `k`; return down's N."""
        up, down = f"{prefix}gate_up", f"{prefix}down"
        n = self.check(rule, up, k, batch)
        if gated and n % 2:
            raise rule.error(f"{up}_weight must have an even number of rows (gate and up), found {n}")
        h = self.check(rule, down, n // 2 if gated else n, batch)
        for projection, channels in ((up, n), (down, h)):
            rule.expect(f"{projection}_bias", (*batch, channels))
        return h

    def smallest_shared_expert(self, hidden: int, gated: bool, residual: int = 0) -> dict[str, Shape]:
        """Shapes of its inputs by name: what a model without a shared expert gives as zeros. `residual`: residual
        channels of its products."""
        intermediate = max(BLOCK, residual)
        shapes: dict[str, Shape] = {}
        for projection, n, k in (
            ("gate_up", 2 * intermediate if gated else intermediate, hidden),
            ("down", hidden, intermediate),
        ):
            inputs = self.parts(n, k + residual) | {"bias": (n,)}
            shapes |= {f"shared_{projection}_{part}": shape for part, shape in inputs.items()}
        return shapes | {"shared_gate": (hidden,)}

    def check_scales(self, rule: ShapeRule, batch: Shape = ()) -> None:
        """Check the scales of activations, one for each of `batch`."""
        for scale in self.scales:
            rule.expect(scale.name, batch)


NVFP4 = WeightFormat(
    parts=lambda n, k: {"weight": (n, k // 2), "scales": tiled_shape(n, k // BLOCK), "tensor_scale": ()},
    values_per_byte=2,
    scales=(
        Formal("input_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
        Formal("hidden_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    weight=dequantize_weight,
    seen=gemm_input,
    constants=text.constants(),
    weight_onnx=text.dequantize_weight,
    seen_onnx=text.gemm_input,
    flags={"quantize_activations": 0, **QUANTIZATION_FLAGS},
    ranges=QUANTIZATION_RANGES,
    attributes_onnx=text.attribute_flag("quantize_activations") + "\n" + text.quantization_attributes(),
)

E4M3 = WeightFormat(
    parts=lambda n, k: {"weight": (n, k), "scale": (n,)},
    values_per_byte=1,
    scales=(
        Formal("input_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
        Formal("hidden_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
    ),
    weight=dequantize_e4m3,
    seen=lambda rows, dtype, given_scale: through_e4m3(rows, given_scale),
    constants=text.e4m3_constants(),
    weight_onnx=text.dequantize_e4m3,
    seen_onnx=text.through_e4m3,
)
