"""NVFP4Decoder: the body against the Torch reference, that against the composed ops, and every misuse."""

from typing import Any

import pytest
import torch
from decoder_bodies import CAPACITY, HEADS, LAYERS, K, inputs, model_of
from op_bodies import RUNNERS, onnxruntime_outputs
from torch import Tensor
from torch.nn import functional

from trt_nvfp4.plugins.ops import OPS, Activation, OpError

OP = OPS["NVFP4Decoder"]
NAMES = [formal.name for formal in OP.inputs]


def assert_body_agrees(runner: Any, tensors: list[Tensor], opset: int = 21, **attributes: Any) -> None:
    wanted_y, wanted = OP.reference(*tensors, heads=HEADS, **attributes)
    y, present = runner(model_of(OP, tensors, opset, heads=HEADS, **attributes), tensors)
    tolerance = 1e-4 if y.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.float(), wanted_y.float(), rtol=tolerance, atol=tolerance)
    if wanted.dtype == torch.int8:
        wanted, present = (x.to(torch.int8).view(torch.float8_e4m3fn).float() for x in (wanted, present))
        tolerance = 0.13  # rounding may fall on the other side
    torch.testing.assert_close(present.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@RUNNERS
@pytest.mark.parametrize(("fp8", "attributes"), [
    (False, {}),
    (True, {"rope": 1, "qk_norm": 1, "epsilon": 1e-5}),
    (False, {"rope": 2, "window": 3, "scale": 0.5, "softcap": 3.0, "activation": int(Activation.GELU_TANH)}),
], ids=str)  # fmt: skip
def test_body_variants(runner: Any, fp8: bool, attributes: dict[str, Any], seed: int) -> None:
    tensors = inputs(seed, [0, 4, CAPACITY - 2], 2, fp8=fp8)
    assert_body_agrees(runner, tensors, fp8_cache=int(fp8), **attributes)


@pytest.mark.parametrize("opset", [17, 21, 24])
def test_body_types_and_opsets(opset: int, seed: int) -> None:
    assert_body_agrees(onnxruntime_outputs, inputs(seed, [3, CAPACITY - 1], 1, torch.float16), opset, rope=1, qk_norm=1)


@pytest.mark.parametrize(("batch", "new"), [(0, 2), (2, 0)])
def test_no_tokens(batch: int, new: int, seed: int) -> None:
    tensors = inputs(seed, [4] * batch, new)
    y, present = OP.reference(*tensors, heads=HEADS, rope=1)
    assert y.shape == (batch, new, K)
    assert torch.equal(present.nan_to_num(), tensors[1].nan_to_num())


def test_reference_is_its_parts(seed: int) -> None:
    """One layer as the ops that it takes the place of."""
    tensors = inputs(seed, [2, 5], 1)
    y, present = OP.reference(*tensors, heads=HEADS, rope=1, qk_norm=1)
    by_name = dict(zip(NAMES, tensors, strict=True))
    linear, attention, mlp = (OPS[name].reference for name in ("NVFP4Linear", "CachedAttention", "NVFP4PersistentMLP"))

    def weight(name: str, layer: int) -> list[Tensor]:
        return [by_name[f"{name}_{part}"][layer] for part in ("weight", "scales", "tensor_scale", "bias")]

    def of(layer: int, *names: str) -> list[Tensor]:
        return [by_name[name][layer] for name in names]

    x, presents, none = tensors[0], [], torch.tensor(0.0)
    for i in range(LAYERS):
        normed = functional.rms_norm(x, (K,), by_name["attention_norm_weight"][i], 1e-6)
        qkv = linear(normed, *weight("qkv", i), none, activation=0)
        norms, scales = of(i, "q_norm_weight", "k_norm_weight"), of(i, "key_scale", "value_scale")
        call = [qkv, *by_name["past"][i], *tensors[2:5], *norms, torch.zeros(HEADS), *scales]
        a, *new = attention(*call, heads=HEADS, rope=1, qk_norm=1)
        middle = x + linear(a, *weight("output", i), none, activation=0)
        parts = [part[None] for part in (*of(i, "mlp_norm_weight"), *weight("up", i), *weight("down", i), none, none)]
        x = mlp(middle, *parts, activation=int(Activation.SILU), gated=1, norm=1, residual=1)
        presents.append(torch.stack(new))
    torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(present, torch.stack(presents), rtol=1e-4, atol=1e-4, equal_nan=True)


MISFITS = [
    ({"heads": 3}, {}, "KV heads must divide heads, 3, found 2"),
    ({"heads": 8}, {}, "output_weight must have shape|qkv_weight must have 192 rows"),
    ({"heads": 4, "rope": 3}, {}, "rope must be 0 to 2"),
    ({"heads": 4}, {"past": (2, 1, 2, 2, 9, 16)}, r"past must have shape \[2, 2, 2, 2, 9, 16\]"),
    ({"heads": 4}, {"past": (2, 2, 2, 2, 16)}, "past must be"),
    ({"heads": 4, "rope": 1}, {"cos": (12, 9), "sin": (12, 9)}, "cos must have 1 to 8 columns"),
    ({"heads": 4}, {"mlp_norm_weight": (1, 48)}, r"mlp_norm_weight must have shape \[2, 48\]"),
    ({"heads": 4}, {"past_length": (3,)}, r"past_length must have shape \[2\]"),
]


@pytest.mark.parametrize(("attributes", "other", "message"), MISFITS)
def test_misfits_are_named(attributes: dict[str, Any], other: dict[str, Any], message: str, seed: int) -> None:
    shapes = {name: tuple(x.shape) for name, x in zip(NAMES, inputs(seed, [0, 1], 1), strict=True)} | other
    with pytest.raises(OpError, match=message):
        OP.output_shapes(list(shapes.values()), **attributes)
