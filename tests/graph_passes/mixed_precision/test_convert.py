"""Float32 networks in 16 bits: what stays, that they compute the same, that the same subgraphs are found in them."""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onnx_models.float32_networks import Float32Network, Inputs, exporters
from onnx_models.float32_networks import network as float32_network
from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.accuracy.runners import ModelRunner
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.activation_types import Activations
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose, observed_tensors, slow_products
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kernels import kernel_class
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import rewrite
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import Matrix, constant

# Encoders, a diffusion transformer, a decoder; MiniLM, which takes longer, is in benchmarks/accuracy.
CASES = [
    (name, exporter)
    for name in ("bert", "vit", "siglip", "t5", "whisper", "dit", "llama", "deepseek")
    for exporter in exporters(name)
]


@dataclass(frozen=True)
class Network:
    """An exported network, and the same in BF16."""

    float32: Float32Network
    original: SourceModel
    converted: SourceModel


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    name, exporter = request.param
    made = float32_network(name)
    path = tmp_path_factory.mktemp(name) / "model.onnx"
    made.export(path, exporter)
    original = load(path)
    return Network(made, original, convert(original, choose(original, "auto")))


def outputs(model: Path, inputs: Inputs, rounding: bool = False) -> np.ndarray:
    feed = {name: value.numpy() for name, value in inputs.items()}
    return np.asarray(session(model, rounding=rounding).run(None, feed)[0])


def error(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


def test_it_computes_what_torch_computes_in_bfloat16(network: Network, tmp_path: Path, seed: int) -> None:
    """As near to float32 as the module itself is after .to(bfloat16), every result rounded; and valid ONNX."""
    path = tmp_path / "bf16.onnx"
    write(network.converted.ir_model, path)
    onnx.checker.check_model(str(path), full_check=True)
    inputs = network.float32.draw(seed)
    expected = network.float32.run(inputs).numpy()
    reference = network.float32.run(inputs, torch.bfloat16).numpy()
    assert error(outputs(network.original.path, inputs), expected) < 1e-5
    rounded = error(outputs(path, inputs, rounding=True), expected)
    assert 1e-4 < rounded < max(1.5 * error(reference, expected), 0.01)


def test_the_same_subgraphs_are_found_and_none_is_served_by_generic_kernels(network: Network) -> None:
    def described(model: SourceModel) -> list[tuple[str, str, str | None, int, list[str]]]:
        return [(s.name, s.activation, s.unsupported, len(s.mlps), s.linear_inputs) for s in find_subgraphs(model)]

    assert described(network.converted) == described(network.original)
    found = find_subgraphs(network.converted)
    assert {subgraph.dtype for subgraph in found} == {"bfloat16"}
    for target in TARGETS.values():
        plan = make_plan(network.converted, found, target.capabilities, PlanOptions(calibrated=True))
        classes = [kernel_class(entry, target.capabilities) for entry in plan.subgraphs if entry.kind != "linear"]
        assert all(found is not None and not found.is_generic for found in classes)


def test_only_named_nodes_compute_in_float32(network: Network) -> None:
    stays = network.converted.activations.float32_nodes
    for node in network.converted.graph:
        if node.op_type in ("MatMul", "Gemm", "Conv", "LayerNormalization") and node.name not in stays:
            assert node.outputs[0].dtype == ir.DataType.BFLOAT16
        if any(value.dtype == ir.DataType.FLOAT for value in node.outputs) and node.op_type not in ("Cast", "Constant"):
            assert node.name in stays


def test_interfaces_keep_their_types(network: Network) -> None:
    for before, after in ((network.original, network.converted),):
        for ours, theirs in ((before.graph.inputs, after.graph.inputs), (before.graph.outputs, after.graph.outputs)):
            assert [(v.name, v.dtype) for v in ours] == [(v.name, v.dtype) for v in theirs]


def test_weights_are_quantized_from_the_float32_values(network: Network) -> None:
    def matrices(model: SourceModel) -> list[torch.Tensor]:
        parts = [s for s in find_subgraphs(model) if s.unsupported is None]
        return [torch.cat(list(Matrix([linear.weight]).chunks())) for s in parts for linear in s.linears]

    for before, after in zip(matrices(network.original), matrices(network.converted), strict=True):
        assert torch.equal(before, after)


def test_ranges_can_be_observed_in_every_network(network: Network, seed: int) -> None:
    """T5 takes the logarithm of 0 among the numbers of its positions; FP16 leaves those alone."""
    names = observed_tensors(network.original)
    feed = {name: value.numpy() for name, value in network.float32.draw(seed).items()}
    values = session(network.original.path, names).run(names, feed)
    assert all(np.isfinite(value).all() for value in values)


def mlp(path: Path, rng: np.random.Generator, scale: float = 1.0) -> Path:
    """x -> up -> Relu -> down -> y, float32, whose hidden values grow with `scale`."""
    weights = {"up": rng.standard_normal((64, 128)) * scale, "down": rng.standard_normal((128, 64)) / scale / 100}
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        mlp (float[tokens, 64] x) => (float[tokens, 64] y) {
            [first] h = MatMul(x, up)
            [act] a = Relu(h)
            [second] d = MatMul(a, down)
            [end] y = Tanh(d)
        }""")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    onnx.save(model, path)
    return path


def test_what_leaves_the_range_of_float16_stays_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    """As T5's hidden values do: the nodes that make or read them are named, and no output is infinite."""
    model = load(mlp(tmp_path / "m.onnx", rng, scale=1e5))
    x = rng.standard_normal((8, 64)).astype(np.float32)
    assert set(observed_tensors(model)) == {"h", "a", "d", "y"}
    names = ["h", "a", "d"]
    values = session(model.path, names).run(names, {"x": x})
    ranges = {name: float(np.abs(value).max()) for name, value in zip(names, values, strict=True)}
    assert ranges["h"] > 65504 > 32752 > ranges["d"]

    def run(activations: Activations) -> np.ndarray:
        path = tmp_path / "fp16.onnx"
        write(convert(model, activations).ir_model, path)
        return np.asarray(session(path).run(None, {"x": x})[0])

    chosen = choose(model, "fp16", ranges=ranges)
    assert chosen.float32_nodes.keys() == {"first", "act", "second"}
    assert all("65504" in reason or "range" in reason for reason in chosen.float32)
    expected = session(model.path).run(None, {"x": x})[0]
    assert np.isfinite(run(chosen)).all()
    assert error(run(chosen), expected) < 2e-3


def test_constants_are_converted_once_and_masks_stay_finite(tmp_path: Path, rng: np.random.Generator) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        attention (float[n, 64] x, bool[n, n] seen) => (float[n, 64] y) {
            low = Constant <value: tensor = float {-3.4028234e38}> ()
            zero = Constant <value: tensor = float {0.0}> ()
            t = Transpose (x)
            [scores] s = MatMul(x, t)
            mask = Where(seen, zero, low)
            m = Add(s, mask)
            p = Softmax(m)
            [mix] z = MatMul(p, x)
            [out] y = MatMul(z, w)
        }""")
    w = rng.standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    source = load(tmp_path / "m.onnx")
    x = rng.standard_normal((6, 64)).astype(np.float32) / 8
    seen = np.tri(6, dtype=bool)
    seen[0] = False  # nothing is seen
    feed = {"x": x, "seen": seen}
    expected = session(source.path).run(None, feed)[0]
    for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        converted = convert(source, choose(source, kind))
        assert not converted.activations.float32
        write(converted.ir_model, path := tmp_path / f"{kind}.onnx")
        stored = {t.name: t for t in onnx.load(path).graph.initializer}
        assert np.array_equal(onnx.numpy_helper.to_array(stored["w"]).view(np.uint16), w.astype(dtype).view(np.uint16))
        result = session(path, rounding=True).run(None, feed)[0]
        assert np.isfinite(result).all()
        assert error(result[1:], expected[1:]) < 0.02
        kept = next(v for v in converted.graph.initializers.values() if v.name == "w")
        assert np.array_equal(constant(kept), w)


def test_models_that_are_left_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    half = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
            "half",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [4, 16])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [4, 16])],
            [onnx.numpy_helper.from_array(rng.standard_normal((16, 16)).astype(np.float16), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    onnx.save(half, tmp_path / "half.onnx")
    model = load(tmp_path / "half.onnx")
    assert choose(model, "auto") == Activations()
    with pytest.raises(ValueError, match="--activations bf16 is for float32 models"):
        choose(model, "bf16")
    wide = load(mlp(tmp_path / "wide.onnx", rng))
    assert choose(wide, "keep") == Activations()
    assert convert(wide, Activations()).graph is wide.graph


def test_caches_that_are_updated_in_place_take_the_type_of_the_network(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """They stay an input and an output around one TensorScatter, and the step computes the same to rounding."""
    tiny = TinyDecoder(rng)
    source = load(tiny.save(tmp_path / "tiny.onnx"))
    converted = convert(source, choose(source, "auto"))
    write(converted.ir_model, tmp_path / "bf16.onnx")
    graph = onnx.load(tmp_path / "bf16.onnx").graph
    interfaces = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    caches = {*tiny.decoder.caches, *tiny.decoder.presents}
    assert {interfaces[name] for name in caches} == {TensorProto.BFLOAT16}
    assert interfaces["logits"] == TensorProto.FLOAT
    scatters = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "TensorScatter"}
    assert scatters == dict(zip(tiny.decoder.caches, tiny.decoder.presents, strict=True))
    feeds = {
        "input_ids": rng.integers(0, 64, (2, 5)),
        "past_length": np.array([3, 0]),
        "new_length": np.array([5, 4]),
        **{name: rng.standard_normal((2, 2, 24, 8)).astype(np.float32) for name in tiny.decoder.caches},
    }
    expected, found = (session(tmp_path / name, rounding=True).run(None, feeds) for name in ("tiny.onnx", "bf16.onnx"))
    for x, y in zip(expected, found, strict=True):
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(x)


def test_float32_caches_of_a_network_in_float16_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(TinyDecoder(rng).save(tmp_path / "tiny.onnx"))
    with pytest.raises(ValueError, match="updates a float32 cache in place; choose bf16"):
        choose(source, "fp16")


@pytest.mark.parametrize("steps", [10, 100])
def test_steps_of_denoising_add_up_in_float32(steps: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """x + dt * v: what is added in one of 100 steps is less than BF16 can add to x."""
    first, second = (rng.standard_normal((32, 32)).astype(np.float32) / 4 for _ in range(2))
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], "in"),
        helper.make_node("Sigmoid", ["h"], ["s"], "activation"),
        helper.make_node("MatMul", ["s", "second"], ["v"], "out"),
        helper.make_node("Mul", ["v", "dt"], ["change"], "scale"),
        helper.make_node("Add", ["x", "change"], ["next"], "add"),
        helper.make_node("Slice", ["next", "zero", "six", "one"], ["joints"], "cut"),
    ]
    tensors = {"first": first, "second": second, "dt": np.array(-1 / steps, np.float32)}
    tensors |= {"zero": np.array([0]), "six": np.array([6]), "one": np.array([1])}
    values = [helper.make_tensor_value_info(*value) for value in (("next", 1, [4, 32]), ("joints", 1, [4, 6]))]
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info("x", 1, [4, 32])],
        values,
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "step.onnx")
    model = load(tmp_path / "step.onnx")
    chosen = choose(model, "auto")
    assert [nodes for reason, nodes in chosen.float32.items() if "denoising" in reason] == [["scale", "add", "cut"]]

    def denoised(activations: Activations, name: str) -> np.ndarray:
        write(convert(model, activations).ir_model, path := tmp_path / f"{name}.onnx")
        running, x = session(path, rounding=True), start
        for _ in range(steps):
            x = running.run(["next"], {"x": x})[0]
        return x - start

    start = rng.standard_normal((4, 32), np.float32)
    expected = denoised(Activations(), "float32")
    kept = error(denoised(chosen, "bf16"), expected)
    assert kept < 0.01
    if steps == 100:
        assert error(denoised(Activations("bf16"), "rounded"), expected) > 5 * kept


def test_what_the_user_keeps(tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(mlp(tmp_path / "m.onnx", rng))
    chosen = choose(model, "auto", keep="^second$")
    assert chosen == Activations("bf16", {"matched by --set keep-fp32=^second$": ["second"]})
    with pytest.raises(ValueError, match="matches no node"):
        choose(model, "auto", keep="third")
    with pytest.raises(ValueError, match="not a regular expression"):
        choose(model, "auto", keep="(")


def test_a_plan_carries_it_and_an_older_plan_keeps_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(mlp(tmp_path / "m.onnx", rng))
    model = convert(source, choose(source, "auto", keep="end"))
    subgraphs: list[Subgraph] = find_subgraphs(model)
    plan = make_plan(model, subgraphs, TARGETS["ada"].capabilities)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.activations == model.activations
    result = rewrite(convert(source, loaded.activations), loaded, None, tmp_path / "out.onnx")
    assert result.weights_bytes_before == 4 * 2 * 64 * 128
    assert ModelRunner.of(result.path).kind == "rewritten"
    text = (tmp_path / "plan.yaml").read_text()
    start = text.index("activations:\n  type")
    (tmp_path / "old.yaml").write_text(text[:start].replace("bfloat16", "float32").replace("x.bf16", "x"))
    old = Plan.load(tmp_path / "old.yaml")
    assert old.activations == Activations()
    assert old.check(source)


@pytest.mark.parametrize(("opset", "bfloat16"), [(20, False), (21, True)])
def test_convolutions_beside_group_normalization(
    tmp_path: Path, rng: np.random.Generator, opset: int, bfloat16: bool
) -> None:
    """It means another thing since opset 21, so that an older model keeps its opset, whose Conv has no bfloat16."""
    n = helper.make_node
    nodes = [n("Conv", ["x", "w"], ["c"], "conv"), n("GroupNormalization", ["c", "s", "s"], ["y"], num_groups=2)]
    constants = {"w": rng.standard_normal((4, 3, 3, 3)), "s": np.ones(4 if opset > 20 else 2)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 6, 6])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), tmp_path / "m.onnx")
    source = load(tmp_path / "m.onnx")
    activations = choose(source, "auto")
    assert ("conv" not in activations.float32_nodes) == bfloat16
    reason = "1 products with 100% of the weights stay float32, such as node 'conv': operator Conv has no bfloat16"
    assert bfloat16 or reason in str(slow_products(source, activations))
    assert not bfloat16 or slow_products(source, activations) is None


def test_places_in_images_stay_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    """Deformable attention samples where a sigmoid behind an inverse sigmoid says; in BF16 it would miss by pixels."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 22]>
        deformable (float[n, 8, 64, 64] x, float[n, 5, 5, 16] hidden, float[n, 5, 5, 2] place) => (float[n, 8, 5, 5] y)
        <float one = {1.0}, float two = {2.0}, float least = {0.00001}> {
            [to_offset] offset = MatMul(hidden, weight)
            [inside] inside = Clip(place, least, one)
            [outside] outside = Sub(one, inside)
            [more] more = Clip(outside, least, one)
            [odds] odds = Div(inside, more)
            [inverse] inverse = Log(odds)
            [moved] moved = Add(offset, inverse)
            [again] again = Sigmoid(moved)
            [wide] wide = Mul(again, two)
            [grid] grid = Sub(wide, one)
            [sample] y = GridSample(x, grid)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((16, 2)).astype(np.float32), "weight"))
    path = tmp_path / "m.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    original = load(path)
    converted = convert(original, choose(original, "auto"))
    stays = {name for names in converted.activations.float32.values() for name in names}
    expected = {"inside", "outside", "more", "odds", "inverse", "moved", "again", "wide", "grid", "sample"}
    assert stays == expected
    write(converted.ir_model, tmp_path / "bf16.onnx")
    inputs = {
        "x": torch.from_numpy(rng.standard_normal((2, 8, 64, 64)).astype(np.float32)).cumsum(-1),
        "hidden": torch.zeros(2, 5, 5, 16),
        "place": torch.from_numpy(rng.uniform(0.9, 1.0, (2, 5, 5, 2)).astype(np.float32)),
    }
    exact = outputs(path, inputs)
    assert error(outputs(tmp_path / "bf16.onnx", inputs, rounding=True), exact) < 1e-5
