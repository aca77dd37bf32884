"""Sizes that modeling code asks Python for stay dynamic, and float64 becomes float32."""

import sys
from types import ModuleType

import pytest
import torch

from trt_nvfp4.builder.export.torch_module import traced

CODE = """
import torch

class Padded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.polar(torch.ones(64, 4), torch.arange(256.0).reshape(64, 4))
        self.tables = [self.table]

    def forward(self, x):
        length = len(x)
        assert isinstance(3, int)
        padding = int(-x.shape[0]) % 8
        padded = torch.cat([x, x[-1:].repeat(padding, 1)])
        places = torch.arange(length + padding, dtype=torch.int32)
        angles = torch.cat([self.table[places], self.tables[0][places]], -1).unsqueeze(0)[0]
        turned = torch.view_as_complex(padded.float().reshape(-1, 8, 2)) * angles
        wide = torch.view_as_real(turned).flatten(1).double() * places[:, None].double().cos()
        return (wide.to(x.dtype)[:length],)
"""


@pytest.fixture
def modeling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("diffusers.of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(CODE, vars(module))
    return module


def test_other_lengths_than_the_examples(modeling: ModuleType, seed: int) -> None:
    """Multiples of the padding among them, for which nothing is added."""
    torch.manual_seed(seed)
    network = modeling.Padded().eval()
    program = traced(network, {"x": torch.randn(11, 16)}, ({0: torch.export.Dim.AUTO},), 21)
    for length in (3, 16, 21):
        x = torch.randn(length, 16)
        torch.testing.assert_close(program(x)[0], network(x)[0], rtol=1e-4, atol=1e-4)
    types = {value.dtype.name for node in program.model.graph for value in node.outputs if value.dtype is not None}
    assert "DOUBLE" not in types
    assert not {"len", "int"} & vars(modeling).keys()
    assert network.table.is_complex()
    assert network.tables[0].is_complex()
