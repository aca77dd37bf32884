"""NVFP4MoEDecoder: the body against the Torch reference, that against NVFP4Decoder and NVFP4MoE, and every misuse."""

from typing import Any

import decoder_bodies as dense
import pytest
import torch
from decoder_bodies import CAPACITY, HEADS, INTERMEDIATE, LAYERS, K, model_of
from op_bodies import RUNNERS, Inputs
from torch import Tensor

from trt_nvfp4.plugins.ops import OPS, OpError

OP = OPS["NVFP4MoEDecoder"]
NAMES = [formal.name for formal in OP.inputs]
EXPERTS = 5
ROUTER = NAMES.index("router_weight")


def inputs(
    seed: int, lengths: list[int], new: int, dtype: torch.dtype = torch.float32, fp8: bool = False
) -> list[Tensor]:
    made = Inputs(seed + 1, dtype)

    def projection(rows: int, k: int) -> list[Tensor]:
        parts = [made.weight(rows, k, LAYERS * EXPERTS), [made.normal(LAYERS * EXPERTS, rows)]]
        return [x.reshape(LAYERS, EXPERTS, *x.shape[1:]) for part in parts for x in part]

    return [
        *dense.inputs(seed, lengths, new, dtype, fp8)[:ROUTER],
        made.normal(LAYERS, EXPERTS, K),
        *projection(2 * INTERMEDIATE, K),
        *projection(K, INTERMEDIATE),
    ]


@RUNNERS
@pytest.mark.parametrize(("fp8", "attributes"), [
    (False, {"top_k": 2, "renormalize": 1}),
    (True, {"top_k": 1, "scoring": 1, "scaling_factor": 2.5, "rope": 1}),
    (False, {"top_k": EXPERTS, "scoring": 2, "qk_norm": 1}),
], ids=str)  # fmt: skip
def test_body_variants(runner: Any, fp8: bool, attributes: dict[str, Any], seed: int) -> None:
    tensors = inputs(seed, [0, CAPACITY - 2], 2, fp8=fp8)
    wanted_y, wanted = OP.reference(*tensors, heads=HEADS, fp8_cache=int(fp8), **attributes)
    y, present = runner(model_of(OP, tensors, heads=HEADS, fp8_cache=int(fp8), **attributes), tensors)
    torch.testing.assert_close(y.float(), wanted_y, rtol=1e-4, atol=1e-4)
    if not fp8:
        torch.testing.assert_close(present.float(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@RUNNERS
def test_an_expert_overflows_for_its_own_tokens_alone(runner: Any, seed: int) -> None:
    """The first sequence chooses expert 0, whose hidden values are too large for float16; the others do not."""
    tensors = inputs(seed, [3, 4, 5], 1, torch.float16)
    given = dict(zip(NAMES, tensors, strict=True))
    for name in ("output_tensor_scale", "output_bias"):  # attention adds nothing
        given[name].zero_()
    given["mlp_norm_weight"].abs_()
    given["x"].abs_()[1:].neg_()
    given["router_weight"][:, 0] = 10
    given["up_tensor_scale"][0, 0] *= 1e5
    wanted, _ = OP.reference(*tensors, heads=HEADS, top_k=1)
    assert wanted[1:].isfinite().all()
    assert not wanted[0].isfinite().any()
    y, _ = runner(model_of(OP, tensors, heads=HEADS, top_k=1), tensors)
    torch.testing.assert_close(y[1:].float(), wanted[1:].float(), rtol=1e-2, atol=1e-2)
    assert not y[0].isfinite().any()


def test_equal_experts_are_an_mlp(seed: int) -> None:
    """Whatever is chosen: weights that sum to one, of experts that are all the same."""
    ours, theirs = inputs(seed, [3, 5], 2), dense.inputs(seed, [3, 5], 2)
    for at in range(ROUTER + 1, len(NAMES)):
        ours[at] = theirs[at - 1][:, None].expand(LAYERS, EXPERTS, *theirs[at - 1].shape[1:]).contiguous()
    y, present = OP.reference(*ours, heads=HEADS, top_k=3, renormalize=1)
    wanted, wanted_present = OPS["NVFP4Decoder"].reference(*theirs, heads=HEADS)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(present, wanted_present, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("change", "message"), [
    ({"top_k": EXPERTS + 1}, "top_k must be at most the 5 experts, found 6"),
    ({"scoring": 4}, "scoring must be 0 to 2"),
], ids=str)  # fmt: skip
def test_misfits(change: dict[str, int], message: str, seed: int) -> None:
    with pytest.raises(OpError, match=message):
        OP.reference(*inputs(seed, [3], 1), heads=HEADS, **change)


def test_shapes_that_do_not_fit(seed: int) -> None:
    tensors = inputs(seed, [3], 1)
    for name, wrong in (("router_weight", tensors[ROUTER][:, :2]), ("down_bias", tensors[-1][:, :, :16])):
        given = list(tensors)
        given[NAMES.index(name)] = wrong.contiguous()
        with pytest.raises(OpError):
            OP.reference(*given, heads=HEADS)
