"""Nodes put in by hand: MLPs that no pattern knows, against Torch, and through Polygraphy's own command."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
import yaml

surgeon = pytest.importorskip("trt_nvfp4.surgeon", exc_type=ImportError)

from onnx_models.graphs import parsed  # noqa: E402
from trt_nvfp4.graph_passes.load.source import load  # noqa: E402
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs  # noqa: E402
from trt_nvfp4.plugins.ops import OPS  # noqa: E402
from trt_nvfp4.polygraphy_patterns import write_patterns  # noqa: E402

_POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"
K, N, H = 64, 96, 32


@pytest.fixture
def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (K, N), "up": (K, N), "down": (N, H)}
    return {name: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for name, s in shapes.items()}


@pytest.fixture
def unknown(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    """Of a weight that a function of a foreign domain computes, and not from constants alone."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "house": 1]>
        odd (float[tokens, {K}] x) => (float[tokens, {H}] y) {{
            g = MatMul(x, gate)
            w = house.Restore(up, x)
            u = MatMul(x, w)
            sigmoid = Sigmoid(g)
            s = Mul(g, sigmoid)
            a = Mul(s, u)
            y = MatMul(a, down)
        }}
        <opset_import: ["": 21], domain: "house"> Restore (v, x) => (r) {{
            first = Constant<value = int64 {{0}}>()
            one = Gather(x, first)
            nothing = Sub(one, one)
            sum = ReduceSum<keepdims = 0>(nothing)
            r = Add(v, sum)
        }}""")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, tmp_path / "odd.onnx")
    return tmp_path / "odd.onnx"


def run(model: Path | onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return np.asarray(ort.InferenceSession(given, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])


def samples(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).standard_normal((5, K)).astype(np.float32)


def agrees(model: Path | onnx.ModelProto, weights: dict[str, np.ndarray], x: np.ndarray) -> None:
    """With the op's Torch reference on the quantized weights, and, but for 4 bits, with the MLP itself."""
    proto = onnx.load(model) if isinstance(model, Path) else model
    (node,) = [node for node in proto.graph.node if node.domain == "trt_nvfp4"]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    inputs = [torch.from_numpy(x), *(torch.from_numpy(constants[name].copy()) for name in node.input[1:])]
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    expected = OPS[node.op_type].reference(*inputs, **attributes)
    found = run(model, x)
    np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-3, atol=1e-4)
    gate, up, down = (torch.from_numpy(weights[name]) for name in ("gate", "up", "down"))
    rows = torch.from_numpy(x)
    exact = (torch.nn.functional.silu(rows @ gate) * (rows @ up) @ down).numpy()
    assert np.linalg.norm(found - exact) < 0.3 * np.linalg.norm(exact)


def test_no_pattern_knows_it(unknown: Path) -> None:
    assert not [each for each in find_subgraphs(load(unknown)) if each.op == "NVFP4GatedMLP"]


def test_replaced_by_hand(unknown: Path, weights: dict[str, np.ndarray], seed: int) -> None:
    graph = surgeon.to_gs(unknown)
    tensors = graph.tensors()
    graph.replace_with_nvfp4_gated_mlp(
        tensors["x"], tensors["y"], activation="silu", transposed=True, **{key: tensors[key] for key in weights}
    )
    model = surgeon.from_gs(graph)
    assert [node.op_type for node in model.graph.node] == ["NVFP4GatedMLP"]
    onnx.checker.check_model(model)
    agrees(model, weights, samples(seed))
    # Once more through graphsurgeon: nothing of it gets lost.
    again = surgeon.from_gs(surgeon.to_gs(model))
    np.testing.assert_array_equal(run(again, samples(seed)), run(model, samples(seed)))


def test_a_linear_is_added(seed: int) -> None:
    import onnx_graphsurgeon as gs

    rng = np.random.default_rng(seed)
    weight, bias = torch.from_numpy(rng.standard_normal((48, K))).float(), torch.from_numpy(rng.standard_normal(48))
    x = gs.Variable("x", np.float32, ["tokens", K])
    graph = gs.Graph(inputs=[x], opset=21, ir_version=10)
    graph.outputs = [graph.nvfp4_linear(x, weight=weight, bias=bias, activation="identity", name="head")]
    given = samples(seed)
    found, exact = run(surgeon.from_gs(graph), given), given @ weight.numpy().T + bias.numpy()
    assert np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("op", ["fp8_gated_mlp", "nvfp4_persistent_mlp", "nvfp4_moe", "fp8_moe"])
def test_float_weights_of_other_ops(op: str, seed: int) -> None:
    """Against the network in float32; one layer, expert or shared expert in the place of another would be far off."""
    import onnx_graphsurgeon as gs

    generator = torch.Generator().manual_seed(seed)
    count = {"nvfp4_persistent_mlp": 2}.get(op, 4)
    stacked = op != "fp8_gated_mlp"

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*((count,) if stacked else ()), *shape, generator=generator) / shape[-1] ** 0.5

    gate, up, down = draw(N, K), draw(N, K), draw(K, N)
    given: dict[str, Any] = {"gate": gate, "up": up, "down": down, "activation": "silu", "name": "mlp"}
    x = gs.Variable("x", np.float32, ["tokens", K])
    graph = gs.Graph(inputs=[x], opset=21, ir_version=10)
    rows = torch.randn(5, K, generator=generator)
    feed = {"x": rows.numpy()}
    if op == "nvfp4_persistent_mlp":
        norm = 1 + torch.rand(count, K, generator=generator)
        given["norm_weight"], expected = norm.numpy(), rows
        for i in range(count):
            normed = torch.nn.functional.rms_norm(expected, (K,), norm[i], eps=1e-6)
            expected = expected + _mlp(normed, gate[i], up[i], down[i])
    elif stacked:
        logits = torch.randn(5, count, generator=generator)
        graph.inputs.append(gs.Variable("logits", np.float32, ["tokens", count]))
        feed["logits"] = logits.numpy()
        shared = [torch.randn(*s, generator=generator) / s[-1] ** 0.5 for s in ((N, K), (N, K), (K, N))]
        given |= {"router_logits": graph.inputs[1], "top_k": 2, "renormalize": 1}
        given |= dict(zip(("shared_gate_weight", "shared_up", "shared_down"), shared, strict=True))
        best, experts = logits.softmax(-1).topk(2)
        best = best / best.sum(-1, keepdim=True)
        expected = _mlp(rows, *shared)
        for row in range(5):
            for weight, expert in zip(best[row], experts[row], strict=True):
                expected[row] += weight * _mlp(rows[row], gate[expert], up[expert], down[expert])
    else:
        expected = _mlp(rows, gate, up, down)
    graph.outputs = [getattr(graph, op)(x, **given)]
    session = ort.InferenceSession(surgeon.from_gs(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, feed)
    bound = 0.1 if op.startswith("fp8") else 0.3
    assert np.linalg.norm(found - expected.numpy()) < bound * np.linalg.norm(expected.numpy())


def test_a_large_model_keeps_its_weights_in_files(
    unknown: Path, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Weights that nobody touches are not read; metadata and outputs stay."""
    model = onnx.load(unknown)
    onnx.helper.set_model_props(model, {"made by": "house"})
    apart, saved = tmp_path / "apart.onnx", tmp_path / "other" / "saved.onnx"
    saved.parent.mkdir()
    onnx.save(model, apart, save_as_external_data=True, location="apart.data", size_threshold=0)
    graph = surgeon.to_gs(apart)
    surgeon.save(graph, saved)
    again = onnx.load(saved, load_external_data=False)
    assert {entry.key: entry.value for entry in again.metadata_props} == {"made by": "house"}
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in again.graph.initializer)
    x = samples(0)
    for either in (saved, surgeon.from_gs(surgeon.to_gs(apart))):
        np.testing.assert_array_equal(run(either, x), run(unknown, x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": np.zeros((N, K + 1), np.float32)}, "multiple of 16 in_features"),
        ({"gate": np.full((N, K), np.nan, np.float32)}, "NaN or Inf"),
        ({"up": np.zeros((N - 16, K), np.float32)}, "one shape"),
        ({"down": None}, "lacks down"),
        ({"activation": "mish"}, "must be one of"),
        ({"ports": 1}, "has no ports"),
    ],
)
def test_what_cannot_be_made_leaves_the_graph(unknown: Path, change: dict[str, Any], message: str) -> None:
    graph = surgeon.to_gs(unknown)
    tensors, before = graph.tensors(), len(graph.nodes)
    shapes = {"gate": (N, K), "up": (N, K), "down": (H, N)}
    given = {name: np.ones(shape, np.float32) for name, shape in shapes.items()} | change
    with pytest.raises(surgeon.SurgeonError, match=message):
        graph.replace_with_nvfp4_gated_mlp(
            tensors["x"], tensors["y"], **{key: value for key, value in given.items() if value is not None}
        )
    assert len(graph.nodes) == before


@pytest.fixture
def patterns(tmp_path: Path) -> Path:
    write_patterns(tmp_path / "patterns")
    assert {folder.name for folder in (tmp_path / "patterns").iterdir()} == set(OPS)
    return tmp_path / "patterns"


def polygraphy(*arguments: str | Path) -> str:
    command = [sys.executable, "-c", _POLYGRAPHY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_polygraphy_replaces_what_is_written_by_hand(
    unknown: Path, weights: dict[str, np.ndarray], patterns: Path, tmp_path: Path, seed: int
) -> None:
    names = {name: name for name in weights}
    attributes = {**names, "transposed": True, "activation": "silu", "recipe": "mse"}
    instance = {"inputs": ["x"], "outputs": ["y"], "attributes": attributes}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.dump({"name": "NVFP4GatedMLP", "op": "NVFP4GatedMLP", "instances": [instance]}))
    replaced = tmp_path / "replaced.onnx"
    polygraphy("plugin", "replace", unknown, "--plugin-dir", patterns, "--config", config, "-o", replaced)
    agrees(replaced, weights, samples(seed))


@pytest.mark.slow
def test_polygraphy_matches_what_the_finder_finds(
    weights: dict[str, np.ndarray], patterns: Path, tmp_path: Path, seed: int
) -> None:
    text = f"""known (float[tokens, {K}] x) => (float[tokens, {H}] y) {{
            g = MatMul(x, gate)
            s = Sigmoid(g)
            a = Mul(g, s)
            u = MatMul(x, up)
            h = Mul(a, u)
            y = MatMul(h, down)
        }}"""
    path, config, replaced = tmp_path / "known.onnx", tmp_path / "config.yaml", tmp_path / "replaced.onnx"
    onnx.save(parsed(text, weights), path)
    polygraphy("plugin", "match", path, "--plugin-dir", patterns, "-o", config)
    polygraphy("plugin", "replace", path, "--plugin-dir", patterns, "--config", config, "-o", replaced)
    agrees(replaced, weights, samples(seed))
