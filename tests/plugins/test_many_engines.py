"""Two, three and ten engines in one process: plugins of several copies of the library, each with a stream and a CUDA
graph of its own, compute at once what each computes alone."""

import shutil
from pathlib import Path

import numpy as np
import op_inputs
import pytest
import torch

from trt_nvfp4.plugins.host import PluginHost, Session
from trt_nvfp4.plugins.ops import Activation

pytestmark = pytest.mark.gpu

ROUNDS = 20


class Engine:
    """A plugin in a context, with its weights, buffers and stream."""

    def __init__(self, host: PluginHost, rng: np.random.Generator, number: int) -> None:
        # Kinds take turns: one launch of several layers, whose blocks wait for each other, and a single MLP.
        self.tokens = 1 + 7 * number
        if number % 2:
            case = op_inputs.gated_mlp(rng, self.tokens, 1024, 2048, 1024, torch.bfloat16)
            op, attributes = "NVFP4GatedMLP", {"activation": int(Activation.GELU_TANH)}
        else:
            case = op_inputs.persistent_mlp(rng, 3, self.tokens, 1024, 2048, 1024, torch.bfloat16, gated=1)
            op, attributes = "NVFP4PersistentMLP", {"gated": 1, "norm": 1, "residual": 1}
        self.inputs = [x.cuda() for x in case.inputs]
        self.session: Session = host.session(op, self.inputs, attributes)
        (self.alone,) = self.session.run(self.inputs)
        self.workspace = torch.empty(self.session.workspace_size, dtype=torch.uint8, device="cuda")
        self.y = torch.full_like(self.alone, float("nan"))
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.enqueue()

    def enqueue(self) -> None:
        self.session.enqueue(self.inputs, [self.y], self.workspace)

    def right(self) -> bool:
        """Whether the last result is the one alone, but for the order of sums; the result is then forgotten."""
        error = float((self.y.double() - self.alone.double()).norm() / self.alone.double().norm())
        self.y.fill_(float("nan"))
        return error < 1e-2


@pytest.mark.parametrize("count", [2, 3, 10])
def test_at_once(library: Path, tmp_path: Path, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    engines = []
    for number in range(count):
        # A copy has state of its own, as the library of each engine that carries it; every third shares one.
        copy = tmp_path / f"{number - number % 3}-{library.name}"
        if not copy.exists():
            shutil.copy(library, copy)
        engines.append(Engine(PluginHost(copy), rng, number))
    torch.cuda.synchronize()
    for round_ in range(ROUNDS):
        for engine in engines:
            with torch.cuda.stream(engine.stream):
                if round_ % 2:
                    engine.graph.replay()
                else:
                    engine.enqueue()
        torch.cuda.synchronize()
        assert [engine.right() for engine in engines] == [True] * count
        torch.cuda.synchronize()
    for engine in engines:
        engine.session.close()
