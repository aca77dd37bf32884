"""Constants near 0 and 1 are exported as they are: x + 1e-8 is not x."""

import numpy as np
import pytest
import torch

from trt_nvfp4.builder.export.torch_module import traced
from trt_nvfp4.common.onnx_runtime import onnxruntime


class _Norm(torch.nn.Module):
    def __init__(self, epsilon: float, factor: float) -> None:
        super().__init__()
        self.epsilon, self.factor = epsilon, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.factor


@pytest.mark.parametrize(("epsilon", "factor"), [(1e-5, 1.0), (1e-8, 1.3), (1e-12, 1 + 8e-6)])
def test_norms(epsilon: float, factor: float, seed: int) -> None:
    norm = _Norm(epsilon, factor).eval()
    program = traced(norm, {"x": torch.randn(2, 16)}, None, 18)
    assert [value.name for value in program.model.graph.inputs] == ["x"]
    scale = torch.tensor([[0.0], [epsilon**0.5]])
    x = scale * torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, norm(x).numpy(), rtol=1e-6)
