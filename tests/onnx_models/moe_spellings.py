"""Mixtures of experts in the ways that PyTorch code is written: loops, masks, dense sums; what exporters unroll."""

import copy
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its customary name)

from onnx_models.graphs import run
from trt_nvfp4.common import nvfp4

HIDDEN, INTERMEDIATE = 64, 48
DISPATCHES = ("loop", "mask", "scatter", "stack", "gathered", "dense")


@dataclass(frozen=True)
class MoeSpec:
    """One mixture of experts. `sizes` may differ by expert; `missing` experts are left out of the sum."""

    dispatch: str = "loop"
    experts: int = 4
    top_k: int = 2
    scoring: str = "softmax"
    renormalize: bool = True
    gated: bool = True
    biases: bool = False
    shared: bool = False
    factor: float = 1.0
    activation: str = "silu"
    ragged: bool = False
    missing: int = 0
    shows_weights: bool = False  # the routing weights are an output too
    own_input: bool = False  # the router reads what a norm of its own gives
    expert_scales: bool = False  # what an expert gives is multiplied by a number of its own


class Expert(nn.Module):
    def __init__(self, spec: MoeSpec, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, intermediate, spec.biases) if spec.gated else None
        self.up = nn.Linear(HIDDEN, intermediate, spec.biases)
        self.down = nn.Linear(intermediate, HIDDEN, spec.biases)
        self.activation = {"silu": F.silu, "relu2": lambda x: F.relu(x).square(), "tanh": torch.tanh}[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Moe(nn.Module):
    def __init__(self, spec: MoeSpec, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.spec = spec
        self.router = nn.Linear(HIDDEN, spec.experts, bias=False)
        sizes = [INTERMEDIATE + (16 if spec.ragged and e == 1 else 0) for e in range(spec.experts - spec.missing)]
        self.experts = nn.ModuleList(Expert(spec, size) for size in sizes)
        self.shared = Expert(spec, 80) if spec.shared else None
        self.scales = nn.Parameter(torch.rand(spec.experts) + 0.5) if spec.expert_scales else None
        if spec.dispatch in ("gathered", "dense"):  # weights stacked, [experts, in, out]
            for name in ("gate", "up", "down"):
                weights = [getattr(expert, name).weight.T for expert in self.experts]
                setattr(self, f"stacked_{name}", nn.Parameter(torch.stack(weights).detach()))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        spec = self.spec
        rows = x.view(-1, x.shape[-1])
        weights, chosen = self.route(self.router(F.normalize(rows) * HIDDEN**0.5 if spec.own_input else rows))
        y = getattr(self, f"_{spec.dispatch}")(rows, weights, chosen)
        if self.shared is not None:
            y = y + self.shared(rows)
        y = y.view(x.shape)
        return (y, weights) if spec.shows_weights else y

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        scores = {
            "softmax": lambda s: s.softmax(-1),
            "sigmoid": torch.sigmoid,
            "sqrt_softplus": lambda s: F.softplus(s).sqrt(),
            "given": lambda s: s,
            "cos": torch.cos,
        }[spec.scoring](logits)
        weights, chosen = torch.topk(scores, spec.top_k, -1)
        if spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scales is not None:
            weights = weights * self.scales[chosen]
        return weights * spec.factor, chosen

    def _loop(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        masks = F.one_hot(chosen, self.spec.experts).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            rank, token = torch.where(masks[index])
            y.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return y

    def _mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + expert(x) * (weights * (chosen == index)).sum(-1, keepdim=True)
        return y

    def _all(self, weights: Tensor, chosen: Tensor) -> Tensor:
        return torch.zeros(weights.shape[0], self.spec.experts, dtype=weights.dtype).scatter(1, chosen, weights)

    def _scatter(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        every = self._all(weights, chosen)
        return sum(expert(x) * every[:, index, None] for index, expert in enumerate(self.experts))  # type: ignore[return-value]

    def _stack(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs * self._all(weights, chosen)[..., None]).sum(1)

    def _gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = x[:, None, None, :].expand(-1, self.spec.top_k, -1, -1)
        gate, up = rows @ self.stacked_gate[chosen], rows @ self.stacked_up[chosen]
        return ((F.silu(gate) * up) @ self.stacked_down[chosen] * weights[..., None, None]).sum(1).squeeze(1)

    def _dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        hidden = F.silu(x @ self.stacked_gate) * (x @ self.stacked_up)
        return ((hidden @ self.stacked_down) * self._all(weights, chosen).T[..., None]).sum(0)


def export(model: Moe, path: Path, seed: int, opset: int = 17, dynamic: bool = True) -> None:
    """By TorchScript; `dynamic`: batch and sequence, of 2 and 5 otherwise."""
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            torch.onnx.export(
                model.eval(),
                (x.to(next(model.parameters()).dtype),),
                path,
                input_names=["x"],
                dynamo=False,
                opset_version=opset,
                dynamic_axes={"x": {0: "batch", 1: "sequence"}} if dynamic else {},
            )
        finally:
            logging.disable(logging.NOTSET)


def quantize_together(*matrices: Tensor) -> None:
    """Replaces matrices [out, in] by what NVFP4 with one tensor scale makes of them, in place."""
    with torch.no_grad():
        scale = nvfp4.quantize(torch.cat([matrix.reshape(1, -1) for matrix in matrices], 1))[2]
        for matrix in matrices:
            matrix.copy_(nvfp4.dequantize(*nvfp4.quantize(matrix.contiguous(), scale), torch.float32))


def quantized_spelling(model: Moe) -> Moe:
    """A copy with quantized weights; those of down with the number of their expert, which it is folded into."""
    model = copy.deepcopy(model)
    for expert in [*model.experts, *([model.shared] if model.shared is not None else [])]:
        quantize_together(*[part.weight for part in (expert.gate, expert.up) if part is not None])
    stacked = hasattr(model, "stacked_up")
    downs = [
        model.stacked_down[index].T if stacked else expert.down.weight for index, expert in enumerate(model.experts)
    ]
    for index in range(len(downs) if stacked else 0):
        quantize_together(model.stacked_gate[index].T, model.stacked_up[index].T)
    scales = torch.ones(len(downs)) if model.scales is None else model.scales
    with torch.no_grad():
        for down, scale in zip(downs, scales, strict=True):
            down *= scale
            quantize_together(down)
            down /= scale
    if model.shared is not None:
        quantize_together(model.shared.down.weight)
    return model


def assert_computes(path: Path, model: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    """The ONNX model at `path` gives what `model` does, which computes in float32."""
    with torch.no_grad():
        expected = model(x.float()).numpy()
    (y,) = run(path, x.numpy())
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance * np.abs(expected).max())
