"""CachedAttention: the body against the Torch reference, that against torch's own attention, and every misuse."""

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from op_bodies import RUNNERS, TYPES, onnxruntime_outputs
from torch import Tensor
from torch.nn import functional

from trt_nvfp4.plugins.ops import DOMAIN, OPS, OpError

OP = OPS["CachedAttention"]
NAMES = [formal.name for formal in OP.inputs]
HEADS, KV_HEADS, SIZE, CAPACITY = 4, 2, 16, 9


def inputs(
    seed: int, lengths: list[int], new: int, dtype: torch.dtype = torch.float32, fp8: bool = False, rotary: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch = len(lengths)
    caches, scales = [normal(batch, KV_HEADS, CAPACITY, SIZE) for _ in range(2)], [torch.ones(KV_HEADS)] * 2
    if fp8:
        scales = [torch.rand(KV_HEADS, generator=generator) / 50 + 0.005 for _ in range(2)]
        caches = [(x / s[:, None, None]).clamp(-448, 448) for x, s in zip(caches, scales, strict=True)]
        caches = [x.to(torch.float8_e4m3fn).view(torch.int8) for x in caches]
    else:
        caches = [x.to(dtype) for x in caches]
    for cache in caches:  # nothing reads what is not cached
        for b, length in enumerate(lengths):
            cache[b, :, length:] = 127 if fp8 else torch.nan
    angles = normal(12, rotary // 2)
    qkv = normal(batch, new, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
    norms = [normal(SIZE).to(dtype) for _ in range(2)]
    length_type = (torch.int32, torch.int64)[seed % 2]
    past_length = torch.tensor(lengths, dtype=length_type)
    return [qkv, *caches, past_length, angles.cos(), angles.sin(), *norms, normal(HEADS), *scales]


def model_of(tensors: list[Tensor], opset: int = 21, **attributes: Any) -> onnx.ModelProto:
    types = {**TYPES, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64}
    outputs = [formal.name for formal in OP.outputs]
    shapes = OP.output_shapes([tuple(x.shape) for x in tensors], **attributes)

    def values(names: list[str], like: list[Tensor], shapes: list[Any]) -> list[onnx.ValueInfoProto]:
        every = zip(names, like, shapes, strict=True)
        return [helper.make_tensor_value_info(name, types[x.dtype], shape) for name, x, shape in every]

    graph = helper.make_graph(
        [OP.node(NAMES, outputs, "node", **attributes)],
        "attention",
        values(NAMES, tensors, [list(x.shape) for x in tensors]),
        values(outputs, [tensors[0], *tensors[1:3]], shapes),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[OP.function(opset)], opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return model


def assert_body_agrees(runner: Any, tensors: list[Tensor], opset: int = 21, **attributes: Any) -> None:
    expected = OP.reference(*tensors, heads=HEADS, **attributes)
    found = runner(model_of(tensors, opset, heads=HEADS, **attributes), tensors)
    for formal, wanted, actual in zip(OP.outputs, expected, found, strict=True):
        assert tuple(actual.shape) == tuple(wanted.shape), formal.name
        if wanted.dtype == torch.int8:  # as numbers: the sign of zero says nothing
            wanted, actual = (x.to(torch.int8).view(torch.float8_e4m3fn).float() for x in (wanted, actual))
        tolerance = 2e-5 if tensors[0].dtype == torch.float32 else 2e-3
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@RUNNERS
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"rope": 1, "qk_norm": 1, "epsilon": 1e-5},
        {"rope": 2, "has_sinks": 1, "softcap": 3.0},
        {"rope": 1, "window": 3, "scale": 0.5},
        {"rope": 2, "qk_norm": 1, "has_sinks": 1, "window": 1},
    ],
    ids=str,
)
def test_body_variants(runner: Any, attributes: dict[str, Any], fp8: bool, seed: int) -> None:
    tensors = inputs(seed, [0, 4, CAPACITY - 2], 2, fp8=fp8)
    assert_body_agrees(runner, tensors, fp8_cache=int(fp8), **attributes)


@pytest.mark.parametrize("opset", [17, 18, 21, 24])
def test_body_types_and_opsets(opset: int, seed: int) -> None:
    tensors = inputs(seed, [3, CAPACITY - 1], 1, torch.float16)
    assert_body_agrees(onnxruntime_outputs, tensors, opset, rope=1, qk_norm=1)


@pytest.mark.parametrize(("batch", "new"), [(0, 2), (2, 0)])
def test_no_tokens(batch: int, new: int, seed: int) -> None:
    """In ONNX Runtime: the evaluator's GatherND takes no empty batch."""
    tensors = inputs(seed, [4] * batch, new)
    assert_body_agrees(onnxruntime_outputs, tensors, rope=1)
    _, *present = OP.reference(*tensors, heads=HEADS, rope=1)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(present, tensors[1:3], strict=True))


def test_reference_against_torch(seed: int) -> None:
    """Tokens one at a time over a cache, against torch's attention over the whole sequence at once."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(1, CAPACITY, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator)
    rest = inputs(seed, [0], 1)[4:]
    caches = [torch.full((1, KV_HEADS, CAPACITY, SIZE), torch.nan) for _ in range(2)]
    steps = []
    for t in range(CAPACITY):
        y, *caches = OP.reference(qkv[:, t : t + 1], *caches, torch.tensor([t]), *rest, heads=HEADS)
        steps.append(y)
    q, k, v = qkv.view(1, CAPACITY, -1, SIZE).transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), 1)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(steps, 1), expected.transpose(1, 2).flatten(2))


MISFITS = [
    ({"heads": 3}, {}, "KV heads must divide heads, 3, found 2"),
    ({"heads": 8}, {}, r"qkv must have shape \[2, \?, 192\]"),
    ({"heads": 4, "rope": 3}, {}, "rope must be 0 to 2"),
    ({"heads": 4}, {"past_value": (2, 2, 8, 16)}, r"past_value must have shape \[2, 2, 9, 16\]"),
    ({"heads": 4, "rope": 1}, {"cos": (12, 9), "sin": (12, 9)}, "cos must have 1 to 8 columns"),
    ({"heads": 4}, {"sinks": (3,)}, r"sinks must have shape \[4\]"),
    ({"heads": 4}, {"past_length": (3,)}, r"past_length must have shape \[2\]"),
]


@pytest.mark.parametrize(("attributes", "other", "message"), MISFITS)
def test_misfits_are_named(attributes: dict[str, Any], other: dict[str, Any], message: str, seed: int) -> None:
    shapes = {name: tuple(x.shape) for name, x in zip(NAMES, inputs(seed, [0, 1], 1), strict=True)} | other
    with pytest.raises(OpError, match=message):
        OP.output_shapes(list(shapes.values()), **attributes)


@pytest.mark.parametrize(("fp8", "message"), [(0, "past_key must be"), (1, "past_key must be")])
def test_cache_types_are_checked(fp8: int, message: str, seed: int) -> None:
    tensors = inputs(seed, [0], 1, fp8=not fp8)
    with pytest.raises(OpError, match=message):
        OP.reference(*tensors, heads=HEADS, fp8_cache=fp8)
