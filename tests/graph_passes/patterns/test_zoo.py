"""What exporters make of transformers models: every MLP found, none falsely, and rewritten to the quantized model."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from onnx_models.graphs import run
from onnx_models.passes import found_mlps, in_16_bits, plan_all, replaceable, rewritten
from onnx_models.zoo import DTYPES, ZOO, build, export, exportable
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs.values import as_torch

CASES = [(name, exporter) for name in ZOO for exporter in ("dynamo", "torchscript") if exportable(name, exporter)]
CASES_16 = [
    (name, exporter, dtype)
    for name in ("llama", "gemma2", "qwen3", "modernbert", "bert", "vit")
    for exporter in ("dynamo", "torchscript")
    for dtype in ("fp16", "bf16")
    if exportable(name, exporter, dtype)
]
# Linears that the exported output does not need: poolers of BERT, MobileBERT and ViT, the head of SigLIP.
UNUSED_LINEARS = {"bert": 1, "mobilebert": 1, "vit": 1, "siglip": 3}
# Of each kind of MLP one, by both exporters; the rest is slow.
CORE = {
    ("llama", "torchscript"),
    ("bert", "dynamo"),
    ("gpt2", "torchscript"),
    ("modernbert", "torchscript"),
    ("vit", "torchscript"),
    ("t5", "torchscript"),
    ("nemotron", "torchscript"),
    ("vit", "dynamo", "fp16"),
    ("bert", "dynamo", "bf16"),
}

Exported = Callable[[str, str, torch.dtype], tuple[torch.nn.Module, Callable[[int], torch.Tensor], Path]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Exported:
    """The torch model, its input and its export, each exported once."""
    cache: dict[tuple[str, str, torch.dtype], tuple[torch.nn.Module, Callable[[int], torch.Tensor], Path]] = {}

    def get(
        name: str, exporter: str, dtype: torch.dtype
    ) -> tuple[torch.nn.Module, Callable[[int], torch.Tensor], Path]:
        key = (name, exporter, dtype)
        if key not in cache:
            path = tmp_path_factory.mktemp(name) / "model.onnx"
            model, draw = build(name, dtype)
            export(model, draw(0), path, exporter)
            cache[key] = model, draw, path
        return cache[key]

    return get


def params(cases: Sequence[tuple[str, ...]]) -> list[object]:
    return [pytest.param(*case, id="-".join(case), marks=[] if case in CORE else [pytest.mark.slow]) for case in cases]


def quantize_like(model: torch.nn.Module, source: SourceModel) -> torch.nn.Module:
    """`model` in float32, the parameters behind the MLPs of `source` (matched by their values) quantized and
    dequantized."""
    model = copy.deepcopy(model).float()
    # nn.Linear stores [out, in], GPT-2's Conv1D [in, out]; quantization runs along in.
    rows = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    columns = [m.weight.T for m in model.modules() if isinstance(m, Conv1D)]
    for subgraph in found_mlps(source):
        for block in subgraph.blocks:
            for linears in (block.mlp.linears[:-1], block.mlp.linears[-1:]):
                _quantize_group(
                    [*rows, *columns],
                    [as_torch(source.tensor(linear.weight.stored.name or "")).float() for linear in linears],
                )
    return model


def _quantize_group(matrices: list[torch.Tensor], stored: list[torch.Tensor]) -> None:
    """Quantizes in place, with one tensor scale, the matrices [out, in] that equal `stored` in either orientation."""
    found = []
    for tensor in stored:
        same = [m for m in matrices if any(m.shape == t.shape and torch.equal(m, t) for t in (tensor, tensor.T))]
        assert len(same) == 1
        found.append(same[0])
    scale = nvfp4.quantize(torch.cat([m.detach().reshape(1, -1) for m in found], 1))[2]
    with torch.no_grad():
        for matrix in dict.fromkeys(found):
            matrix.copy_(nvfp4.dequantize(*nvfp4.quantize(matrix.contiguous(), scale), torch.float32))


@pytest.mark.parametrize(("name", "exporter"), params(CASES))
def test_found_and_rewritten(name: str, exporter: str, exported: Exported, seed: int) -> None:
    entry = ZOO[name]
    model, draw, path = exported(name, exporter, torch.float32)
    source = load(path)
    mlps = found_mlps(source)
    assert [(m.kind, m.activation, m.unsupported) for m in mlps] == [(entry.kind, entry.activation, None)] * entry.mlps
    assert len({m.name for m in mlps}) == entry.mlps
    result = rewritten(source, plan_all(source, kinds=("gated_mlp", "mlp")))
    assert result.weights_bytes_after < result.weights_bytes_before

    reference = quantize_like(model, source)
    x = draw(seed)
    if not entry.vision:
        x = x[:1, :5]  # another batch and another length than exported
    with torch.no_grad():
        expected = reference(x).numpy()
    (found,) = run(result.path, x.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "exporter", "dtype"), params(CASES_16))
def test_found_and_rewritten_in_16_bits(name: str, exporter: str, dtype: str, exported: Exported, seed: int) -> None:
    entry = ZOO[name]
    model, draw, path = exported(name, exporter, DTYPES[dtype])
    source = load(path)
    mlps = found_mlps(source)
    assert [(m.kind, m.activation, m.unsupported) for m in mlps] == [(entry.kind, entry.activation, None)] * entry.mlps
    assert {m.dtype for m in mlps} == {str(DTYPES[dtype]).removeprefix("torch.")}

    result = rewritten(source, plan_all(source, kinds=("gated_mlp", "mlp")))
    x = draw(seed)
    reference = quantize_like(model, source)
    with torch.no_grad():
        expected = reference(x.float() if entry.vision else x).numpy()
    # ONNX Runtime has hardly a kernel for bfloat16: it computes in float32 what float16 rounds after every operator.
    (found,) = run(widen(onnx.load(result.path)), (x.float() if x.dtype == torch.bfloat16 else x).numpy())
    tolerance = {"fp16": 3e-3, "bf16": 2e-6}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("name", "exporter"), params(CASES))
def test_every_linear_of_the_rest(name: str, exporter: str, exported: Exported) -> None:
    """Linears and MLPs together own every matrix that the model multiplies by, and no matrix twice; as many of them
    can be replaced in 16 bits."""
    model, _, path = exported(name, exporter, torch.float32)
    source = load(path)
    assert replaceable(in_16_bits(source)) == replaceable(source)
    found = find_subgraphs(source)
    stored = [linear.weight.stored.name for subgraph in found for linear in subgraph.linears]
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"]
    fused = sum(
        subgraph.kind == "gated_mlp" and len({linear.weight.stored for linear in subgraph.linears}) == 2
        for subgraph in found
    )
    assert len(stored) - fused == len(set(stored)) == len(modules) - UNUSED_LINEARS.get(name, 0)
