"""Runs an op's ONNX function body in ONNX Runtime and in the reference evaluator, beside its Torch reference."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from trt_nvfp4.plugins.ops import DOMAIN, OPS
from trt_nvfp4.plugins.ops.number_formats import pack, quantize_blocks, tensor_scale, tile_scales

TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.int8: TensorProto.INT8,
}
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}  # of the largest output: 1 ulp and rounding


class Inputs:
    """Random inputs of the ops, reproducible by seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def weight(self, n: int, k: int, layers: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Packed weights, tiled scales, tensor scale, each with a leading dimension if there are layers."""
        matrices = [torch.randn(n, k, generator=self.generator) / k**0.5 for _ in range(layers or 1)]
        scales = [tensor_scale(matrix.abs().max()) for matrix in matrices]
        quantized = [quantize_blocks(matrix, scale) for matrix, scale in zip(matrices, scales, strict=True)]
        packed = torch.stack([pack(codes).view(torch.int8) for codes, _ in quantized])
        tiled = torch.stack([tile_scales(blocks).view(torch.int8) for _, blocks in quantized])
        stacked = torch.stack(scales)
        return (packed, tiled, stacked) if layers else (packed[0], tiled[0], stacked[0])

    def linear(self, lead: Sequence[int], n: int, k: int, scale: float = 0.0) -> list[Tensor]:
        return [self.normal(*lead, k), *self.weight(n, k), self.normal(n), torch.tensor(scale)]

    def gated_mlp(self, lead: Sequence[int], k: int, i: int, h: int, scale: float = 0.0) -> list[Tensor]:
        up, down = self.weight(2 * i, k), self.weight(h, i)
        scales = [torch.tensor(scale), torch.tensor(scale)]
        return [self.normal(*lead, k), *up, self.normal(2 * i), *down, self.normal(h), *scales]

    def persistent_mlp(
        self, lead: Sequence[int], k: int, i: int, h: int, layers: int, gated: int, scale: float = 0.0
    ) -> list[Tensor]:
        n = 2 * i if gated else i
        up, down = self.weight(n, k, layers), self.weight(h, i, layers)
        scales = [torch.full((layers,), scale) for _ in range(2)]
        norm_weight = self.normal(layers, k)
        return [
            self.normal(*lead, k), norm_weight, *up, self.normal(layers, n), *down, self.normal(layers, h), *scales
        ]  # fmt: skip

    def moe(self, lead: Sequence[int], h: int, i: int, experts: int, gated: int = 1, s: int = 16) -> list[Tensor]:
        n, shared_n = (2 * i, 2 * s) if gated else (i, s)
        routing = self.routing(lead, experts)
        routed = [*self.weight(n, h, experts), self.normal(experts, n)]
        routed += [*self.weight(h, i, experts), self.normal(experts, h)]
        shared = [*self.weight(shared_n, h), self.normal(shared_n), *self.weight(h, s), self.normal(h), self.normal(h)]
        return [self.normal(*lead, h), *routing, *routed, *shared, torch.tensor(0.0), torch.tensor(0.0)]

    def routing(self, lead: Sequence[int], experts: int) -> list[Tensor]:
        """Logits of bfloat16 precision and a bias of eighths: ties, and keys that rounding cannot reorder."""
        logits = torch.randn(*lead, experts, generator=self.generator).bfloat16().float()
        return [logits, torch.randint(-2, 3, (experts,), generator=self.generator) / 8]

    def fp8_weight(self, n: int, k: int, *lead: int) -> list[Tensor]:
        """E4M3 bytes, their scales, and a bias."""
        matrix = torch.randn(*lead, n, k, generator=self.generator) / k**0.5
        scales = matrix.abs().amax(-1) / 448
        values = (matrix / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
        return [values, scales, self.normal(*lead, n)]

    def fp8_gated_mlp(self, lead: Sequence[int], k: int, i: int, h: int, scale: float = 0.0) -> list[Tensor]:
        weights = [*self.fp8_weight(2 * i, k), *self.fp8_weight(h, i)]
        return [self.normal(*lead, k), *weights, torch.tensor(scale), torch.tensor(scale)]

    def fp8_moe(
        self, lead: Sequence[int], h: int, i: int, experts: int, gated: int = 1, s: int = 16, scale: float = 0.0
    ) -> list[Tensor]:
        n, shared_n = (2 * i, 2 * s) if gated else (i, s)
        weights = [*self.fp8_weight(n, h, experts), *self.fp8_weight(h, i, experts)]
        weights += [*self.fp8_weight(shared_n, h), *self.fp8_weight(h, s), self.normal(h)]
        scales = [torch.tensor(scale), torch.tensor(scale)]
        return [self.normal(*lead, h), *self.routing(lead, experts), *weights, *scales]

    def small(self, op: str) -> list[Tensor]:
        """Inputs of any op, three rows."""
        made: list[Tensor] = {
            "NVFP4Linear": lambda: self.linear((3,), 16, 32),
            "NVFP4GatedMLP": lambda: self.gated_mlp((3,), 32, 48, 32),
            "NVFP4PersistentMLP": lambda: self.persistent_mlp((3,), 32, 48, 32, 2, 1),
            "NVFP4MoE": lambda: self.moe((3,), 32, 48, 4),
            "FP8GatedMLP": lambda: self.fp8_gated_mlp((3,), 32, 48, 32),
            "FP8MoE": lambda: self.fp8_moe((3,), 32, 48, 4),
            "NVFP4Quantize": lambda: self.quantize((3,), 32),
        }[op]()
        return made

    def quantize(self, lead: Sequence[int], k: int, scale: float = 0.0) -> list[Tensor]:
        return [self.normal(*lead, k), self.normal(*lead, k), self.normal(k), torch.tensor(scale)]


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))


def activations_of(op: str) -> int:
    """How many of its inputs, the first ones, have a row for each token."""
    return 2 if op in ("NVFP4Quantize", "NVFP4MoE", "FP8MoE") else 1


def model_of(op: str, tensors: Sequence[Tensor], opset: int = 21, /, **attributes: Any) -> onnx.ModelProto:
    """A model of one node that carries the op's function; activations are inputs with a free first dimension."""
    definition = OPS[op]
    names = [formal.name for formal in definition.inputs]
    outputs = [formal.name for formal in definition.outputs]
    node = definition.node(names, outputs, "node", **attributes)
    activations = activations_of(op)
    shapes: list[list[Any]] = [list(tensor.shape) for tensor in tensors]
    for shape in shapes[:activations]:
        shape[:-1] = [f"d{i}" for i in range(len(shape) - 1)]
    output_shapes = definition.output_shapes([tuple(shape) for shape in shapes], **attributes)
    output_types = [
        {"T": TYPES[tensors[0].dtype], "tensor(int8)": TensorProto.INT8}.get(formal.type, TensorProto.FLOAT)
        for formal in definition.outputs
    ]
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, TYPES[tensor.dtype], shape)
            for name, tensor, shape in zip(names, tensors, shapes, strict=True)
        ][:activations],
        list(map(helper.make_tensor_value_info, outputs, output_types, output_shapes)),
        [numpy_helper.from_array(to_numpy(t), n) for n, t in zip(names, tensors, strict=True)][activations:],
    )
    model = helper.make_model(
        graph,
        functions=[definition.function(opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def onnxruntime_outputs(model: onnx.ModelProto, tensors: Sequence[Tensor]) -> list[Tensor]:
    """bfloat16 crosses the boundary as float32: ONNX Runtime's NumPy interface has none."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    feeds = {}
    for value, tensor in zip(model.graph.input, tensors, strict=False):
        feeds[value.name] = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if tensors[0].dtype == torch.bfloat16:
        for value in model.graph.input:
            if value.type.tensor_type.elem_type != TensorProto.BFLOAT16:
                continue
            model.graph.node.insert(0, helper.make_node("Cast", [value.name], [f"{value.name}_bf16"], to=16))
            for node in model.graph.node:
                if node.domain == DOMAIN:
                    node.input[:] = [f"{name}_bf16" if name == value.name else name for name in node.input]
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        for value in model.graph.output:
            if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
                model.graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}_float"], to=1))
                value.name = f"{value.name}_float"
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [to_torch(array) for array in session.run(None, feeds)]


def evaluator_outputs(model: onnx.ModelProto, tensors: Sequence[Tensor]) -> list[Tensor]:
    feeds = {value.name: to_numpy(t) for value, t in zip(model.graph.input, tensors, strict=False)}
    return [to_torch(array) for array in ReferenceEvaluator(model).run(None, feeds)]


def assert_agrees(op: str, tensors: Sequence[Tensor], runner: Any, opset: int = 21, /, **attributes: Any) -> None:
    expected = OPS[op].reference(*tensors, **attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = runner(model_of(op, tensors, opset, **attributes), tensors)
    assert expected[0].count_nonzero() > 0
    for formal, found, wanted in zip(OPS[op].outputs, actual, expected, strict=True):
        assert found.shape == wanted.shape, formal.name
        wanted = wanted.double()
        if formal.type == "tensor(int8)":
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda m, n=formal.name: f"{n}: {m}")
        else:
            bound = TOLERANCE[tensors[0].dtype] * max(wanted.abs().max().item(), 1e-30)
            off = (found - wanted).abs().reshape(-1, wanted.shape[-1] if wanted.dim() else 1).amax(-1) > bound
            # The hidden activations differ in their last bit, and may fall on the other side of a tie when quantized.
            quantized = op.endswith(("MLP", "MoE")) and (op.startswith("FP8") or attributes.get("quantize_activations"))
            assert off.sum() <= (1 if quantized else 0), formal.name
            assert (found - wanted).norm() <= 0.05 * wanted.norm(), formal.name  # quantizing or not differs by 0.1


RUNNERS = pytest.mark.parametrize("runner", [onnxruntime_outputs, evaluator_outputs], ids=["onnxruntime", "evaluator"])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
