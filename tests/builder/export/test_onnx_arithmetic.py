"""Rotary embeddings written with complex numbers, in real ones: the same values, and nothing patched afterwards."""

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.llama4 import modeling_llama4

from trt_nvfp4.builder.export.onnx_arithmetic import onnx_arithmetic
from trt_nvfp4.builder.export.torch_module import traced


def rotated(module: object, angles: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    numbers = torch.polar(torch.ones_like(angles), angles) * 1.5
    return module.apply_rotary_emb(x, y, numbers.to(x.device))  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [modeling_llama4, modeling_deepseek_v2], ids=["llama4", "deepseek_v2"])
def test_rotary_embeddings(module: object, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 5, 4, 16) if module is modeling_llama4 else (2, 4, 5, 16)  # heads behind or before the positions
    x, y = torch.randn(2, *shape, generator=generator)
    angles = torch.rand(2, 5, 8, generator=generator) * 6
    expected = rotated(module, angles, x, y)
    with onnx_arithmetic():
        found = rotated(module, angles, x, y)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.is_complex()


class Squeezed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + 1
        return x.squeeze(0), x.squeeze(dim=2), x.squeeze(-2), x.squeeze(dim=1), x.squeeze((0, 1)), x.squeeze()


def test_what_squeezing_does_not_change_is_left_out() -> None:
    """ONNX refuses to squeeze a dimension that is not 1."""
    x = torch.randn(2, 1, 3)
    with onnx_arithmetic():
        for found, expected in zip(Squeezed()(x), (x, x, *[x[:, 0]] * 4), strict=True):
            torch.testing.assert_close(found, expected + 1)
        assert torch.ones(()).squeeze(0).shape == torch.ones(()).squeeze(-1).shape == ()
    exported = traced(Squeezed().eval(), {"x": x}, None, 21)
    for found, expected in zip(exported(x), Squeezed()(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_torch_is_restored() -> None:
    originals = torch.polar, torch.view_as_complex, torch.view_as_real, torch.Tensor.squeeze
    with onnx_arithmetic():
        assert torch.polar is not originals[0]
    with pytest.raises(ZeroDivisionError), onnx_arithmetic():
        _ = 1 / 0
    assert (torch.polar, torch.view_as_complex, torch.view_as_real, torch.Tensor.squeeze) == originals
