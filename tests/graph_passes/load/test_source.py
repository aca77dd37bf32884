"""Loading: weights stay on disk, and every kind of broken model gets one clear message."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_models.graphs import mlp_model, parsed, run, spec
from onnx_models.passes import rewritten
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.source import ModelError, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs


@pytest.fixture
def external(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A model whose weights lie in external data, and those weights."""
    model, graph = mlp_model(spec(dtype="bfloat16"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, graph.weights


def test_external_tensors_are_mapped(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, weights = external
    model = load(path)
    for name, expected in weights.items():
        found = model.tensor(name)
        assert found.dtype == ml_dtypes.bfloat16
        assert isinstance(found.base if found.base is not None else found, np.memmap)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("constant_nodes", [False, True])
def test_inline_tensors(dtype: str, constant_nodes: bool, tmp_path: Path) -> None:
    model, graph = mlp_model(spec(dtype=dtype, constant_nodes=constant_nodes, k=64, intermediate=256))
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    for name, expected in graph.weights.items():
        np.testing.assert_array_equal(source.tensor(name), expected)


def test_weights_that_lie_elsewhere(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    """They take the places of those in the file; one without a place, or that does not fit, is refused."""
    path, weights = external
    name, old = next(iter(weights.items()))
    new = ir.tensor(np.ones_like(old), name=name)
    np.testing.assert_array_equal(load(path, weights={name: new}).tensor(name), np.ones_like(old))
    with pytest.raises(ModelError, match="there is no weight 'other'"):
        load(path, weights={"other": new})
    with pytest.raises(ModelError, match=f"the weight '{name}' is BFLOAT16"):
        load(path, weights={name: ir.tensor(np.ones((2, 2), np.float32), name=name)})


def test_no_such_tensor(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(ModelError, match="no constant named 'nothing'"):
        load(external[0]).tensor("nothing")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "absent.onnx")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100, b"PK\x03\x04 zip"])
def test_not_onnx(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx.*not an ONNX"):
        load(path)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.0, 0.999))
def test_truncated(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut anywhere, a model is refused and never half-read."""
    data = mlp_model(spec())[0].SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"model\.onnx"):
        load(path)


def test_external_data_missing(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    external[0].with_name("weights.bin").unlink()
    with pytest.raises(ModelError, match=r"external data file 'weights\.bin' of tensor '\w+' is missing"):
        load(external[0])


def test_external_data_too_short(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    data = external[0].with_name("weights.bin")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"'weights\.bin' is too short: tensor 'down'"):
        load(external[0])


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-4"), ("offset", "abc"), ("length", ""), ("length", "abc")], ids=str
)
def test_external_data_with_senseless_numbers(
    key: str, value: str, external: tuple[Path, dict[str, np.ndarray]]
) -> None:
    model = onnx.load(external[0], load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    onnx.save(model, external[0])
    with pytest.raises(ModelError, match=r"model\.onnx: tensor '\w+' is damaged: "):
        load(external[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"raw_data": b"\0" * 12}, "tensor 'gate' needs 6144 bytes, it has 12"),
        ({"raw_data": b""}, "tensor 'gate' needs 6144 bytes, it has 0"),
        ({"data_type": TensorProto.DOUBLE}, "tensor 'gate' needs 12288 bytes, it has 6144"),
        ({"data_type": TensorProto.UNDEFINED}, "tensor 'gate' is damaged: "),
    ],
    ids=["short", "empty", "other type", "no type"],
)
def test_inline_data_of_another_size(damage: dict[str, bytes | int], message: str, tmp_path: Path) -> None:
    model, _ = mlp_model(spec())
    (gate,) = [tensor for tensor in model.graph.initializer if tensor.name == "gate"]
    for name, value in damage.items():
        setattr(gate, name, value)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize("location", ["../elsewhere.bin", "linked/elsewhere.bin", "/"])
def test_external_data_outside(location: str, external: tuple[Path, dict[str, np.ndarray]]) -> None:
    """By the name that the model gives: relative, absolute, or through a link to a folder."""
    folder = external[0].parent
    (folder / "linked").symlink_to(folder.parent)
    model = onnx.load(external[0], load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location if location != "/" else str(folder / "weights.bin")
    onnx.save(model, external[0])
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(external[0])


@pytest.fixture
def hub_cache(external: tuple[Path, dict[str, np.ndarray]]) -> Path:
    """The model as the cache of the Hugging Face hub holds it: links to files elsewhere under other names."""
    blobs, snapshot = (external[0].parent / name for name in ("blobs", "snapshots/main/onnx"))
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("model.onnx", "weights.bin"):
        blob = external[0].with_name(name).rename(blobs / str(len(name)))
        (snapshot / name).symlink_to(f"../../../blobs/{blob.name}")
    return snapshot / "model.onnx"


def test_external_data_is_a_link_elsewhere(
    hub_cache: Path, external: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model = load(hub_cache)
    for name, expected in external[1].items():
        np.testing.assert_array_equal(model.tensor(name), expected)
    ir.save(model.ir_model, tmp_path / "copy.onnx", external_data="copy.data", size_threshold_bytes=0)
    written = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "copy.onnx").graph.initializer
    }
    for name, expected in external[1].items():
        np.testing.assert_array_equal(written[name].view(np.uint16), expected.view(np.uint16))


def test_external_data_is_a_broken_link(hub_cache: Path) -> None:
    hub_cache.with_name("weights.bin").resolve().unlink()
    with pytest.raises(ModelError, match=r"external data file '.*weights\.bin' of tensor '\w+' is missing"):
        load(hub_cache)


def test_other_name_of_the_default_domain(tmp_path: Path) -> None:
    """ "ai.onnx", in the imports and on nodes, in bodies and functions too."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["ai.onnx": 17, "of.mine": 1]> g (float[2] x) => (float[2] y) {
            zero = Constant<value = float {0.0}>()
            largest = ReduceMax<keepdims = 0>(x)
            positive = Greater(largest, zero)
            r = If (positive) <then_branch = t () => (float[2] a) { a = ai.onnx.Relu(x) },
                               else_branch = e () => (float[2] b) { b = ai.onnx.Neg(x) }>
            y = of.mine.Twice(r)
        }
        <domain: "of.mine", opset_import: ["ai.onnx": 17]> Twice (i) => (o) { o = ai.onnx.Add(i, i) }"""
    )
    onnx.save(model, tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx")
    assert loaded.opset >= 19
    written = ir.to_proto(loaded.ir_model)
    onnx.checker.check_model(written)
    for x in (np.float32([1, -2]), np.float32([-1, -2])):
        (y,) = run(written, x)
        np.testing.assert_array_equal(y, 2 * (np.maximum(x, 0) if x.max() > 0 else -x))


def test_no_default_domain(tmp_path: Path) -> None:
    path = broken(tmp_path, node("Relu", "x", "y"))
    model = onnx.load(path)
    model.opset_import[0].domain = "com.microsoft"
    onnx.save(model, path)
    with pytest.raises(ModelError, match="opset imports lack that of the default domain"):
        load(path)


def broken(path: Path, *nodes: onnx.NodeProto, opset: int = 21) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    domains = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    path = path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return path


def node(op: str, reads: str, gives: str, name: str = "", domain: str = "") -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), [gives], name=name, domain=domain)


@pytest.mark.parametrize(
    ("nodes", "opset", "message"),
    [
        ([node("Unheard", "x", "y", "culprit")], 17, "unknown operator 'Unheard' .*'culprit'"),
        ([node("Relu", "x", "y", "culprit", "of.nobody")], 17, "unknown operator 'Relu' .*'culprit'"),
        ([node("Gelu", "x", "y", "culprit")], 17, "unknown operator 'Gelu' .*'culprit'"),
        # ONNX Runtime makes it of an RMSNorm, in the default domain, where ONNX knows nothing of it.
        ([node("SimplifiedLayerNormalization", "x x", "y")], 17, "ONNX Runtime has optimized, give the original"),
        (
            [node("FastGelu", "x x", "y", "biased", "com.microsoft")],
            21,
            r"FastGelu \(node 'biased'\); give the model as",
        ),
        ([node("Relu", "a", "y", "early"), node("Neg", "x", "a")], 21, r"node 'early' \(Relu\) reads 'a'"),
        ([node("Relu", "x", "y"), node("Neg", "x", "y", "again")], 21, r"'y' is defined twice \(by node 'again'"),
        ([node("Relu", "x", "z")], 21, "nothing produces the graph output 'y'"),
    ],
)
def test_graphs_that_are_refused(nodes: list[onnx.NodeProto], opset: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(broken(tmp_path, *nodes, opset=opset))


def test_model_that_onnxruntime_optimized(tmp_path: Path, seed: int) -> None:
    """Found when it is read, not by TensorRT after hours of calibration and quantization."""
    text = """g (float[batch, sequence, 32] x) => (float[batch, sequence, 32] y) {
        u = MatMul(x, up) v = Add(u, bias) h = Gelu(v) d = MatMul(h, down) y = Add(d, x) }"""
    original = parsed(text, {"up": (32, 48), "bias": (48,), "down": (48, 32)}, seed)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(original.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(ModelError, match=r"does not have: BiasGelu \(node '.+'\); give the model as it was exported"):
        load(tmp_path / "optimized.onnx")


@pytest.mark.parametrize("op", ["MatMulNBits", "QLinearAdd", "DynamicQuantizeLSTM", "GatherBlockQuantized", "QMoE"])
def test_quantized_operators_of_onnxruntime(op: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[16, 16] x) => (y) {{ y = com.microsoft.{op}(x, x, x) }}""")
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=rf"does not have: {op} \(node '.*'\); give the model in float, or with Quant"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize(("op", "activation"), [("Gelu", "gelu"), ("FastGelu", "gelu_tanh")])
def test_gelus_of_onnxruntime_genai(op: str, activation: str, opset: int, tmp_path: Path, seed: int) -> None:
    """They are ONNX's own by another name, and activations of MLPs."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>
        g (float[batch, 32] x) => (float[batch, 32] y, float[batch, 32] z) {{
            u = MatMul(x, up) h = com.microsoft.{op}(u) y = MatMul(h, down) z = com.microsoft.{op}(x) }}"""
    model = parsed(text, {"up": (32, 48), "down": (48, 32)}, seed)
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    (mlp,) = find_subgraphs(source)
    assert (mlp.activation, mlp.unsupported) == (activation, None)
    assert {node.domain for node in source.graph} == {""}  # of which TensorRT lacks FastGelu
    x = np.random.default_rng(seed).standard_normal((5, 32), np.float32)
    for found, expected in zip(run(ir.to_proto(source.ir_model), x), run(model, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_norms_of_onnxruntime_genai(tmp_path: Path, seed: int) -> None:
    """They stay, and the MLP between them is replaced."""
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[batch, sequence, 32] x) => (float[batch, sequence, 32] y) {
            n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(x, weight)
            g = MatMul(n, gate) s = Sigmoid(g) a = Mul(g, s) u = MatMul(n, up) h = Mul(a, u) d = MatMul(h, down)
            y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.00001>(x, d, weight)
        }"""
    model = parsed(text, {"weight": (32,), "gate": (32, 48), "up": (32, 48), "down": (48, 32)}, seed)
    onnx.save(model, tmp_path / "model.onnx")
    result = rewritten(load(tmp_path / "model.onnx"))
    ops = [node.op_type for node in onnx.load(result.path).graph.node]
    assert ops == ["SimplifiedLayerNormalization", "NVFP4GatedMLP", "SkipSimplifiedLayerNormalization"]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for names in (("gate", "up"), ("down",)):
        rows = [torch.from_numpy(numpy_helper.to_array(tensors[name]).T.copy()) for name in names]
        scale = nvfp4.quantize(torch.cat(rows))[2]
        for name, matrix in zip(names, rows, strict=True):
            values = nvfp4.dequantize(*nvfp4.quantize(matrix, scale), torch.float32).T.contiguous()
            tensors[name].CopyFrom(numpy_helper.from_array(values.numpy(), name))
    x = np.random.default_rng(seed).standard_normal((2, 5, 32)).astype(np.float32)
    np.testing.assert_allclose(run(result.path, x)[0], run(model, x)[0], rtol=1e-4, atol=1e-5)


def test_random_nodes_stay_apart(tmp_path: Path) -> None:
    """Equal ones draw numbers of their own; all others that are equal become one."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n] x, bool flag) => (float[n] y) <float half = {0.5}, bool yes = {1}, bool no = {0}> {
            a = Bernoulli(x) b = Bernoulli(x) c = Dropout(x, half, yes) d = Dropout(x, half, yes)
            e = Dropout(x, half, flag) f = Dropout(x, half, flag) g = Dropout(x, half, no) h = Dropout(x, half, no)
            y = Sum(a, b, c, d, e, f, g, h)
        }""")
    onnx.save(model, tmp_path / "model.onnx")
    nodes = list(load(tmp_path / "model.onnx").graph)
    assert [node.op_type for node in nodes] == ["Bernoulli"] * 2 + ["Dropout"] * 5 + ["Sum"]
    assert not any(node.attributes for node in nodes)


def test_casts_to_the_same_type_go(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n] x) => (float[n] y, float16[n] z) { a = Cast<to = 1>(x) z = Cast<to = 10>(a) y = Cast<to = 1>(a) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    found = {(node.inputs[0].name, node.outputs[0].name) for node in source.graph if node.inputs[0] is not None}
    assert found == {("x", "z"), ("x", "y")}  # an output keeps its name


# Of what constants make the weight `m` [32, 48].
MADE_WEIGHTS = {
    "weight_norm": "n = ReduceL2<keepdims = 1>(w, last)  q = Div(w, n)  m = Mul(q, gain)",
    "spectral_norm": "v = MatMul(w, g)  s = ReduceSum<keepdims = 0>(v)  m = Div(w, s)",
    "normalized": "n = ReduceL2<keepdims = 1>(w, last)  c = Clip(n, eps)  s = Expand(c, size)  m = Div(w, s)",
    "scaled": "m = Mul(w, g)",
    "with a low-rank update": "p = MatMul(gain, row)  m = Add(w, p)",
    "of two": "m = Concat<axis = 1>(half, half)",
    "of a vector": "m = Reshape(flat, size)",
    "transposed": "t = Transpose<perm = [1, 0]>(w)  r = Mul(t, column)  m = Transpose<perm = [1, 0]>(r)",
}


@pytest.mark.parametrize(("kind", "precision"), [("float", 1e-5), ("float16", 3e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("body", MADE_WEIGHTS.values(), ids=MADE_WEIGHTS.keys())
def test_weights_that_constants_make(body: str, kind: str, precision: float, tmp_path: Path, seed: int) -> None:
    """They are constants, whose values are computed when they are read; what they are made of stays on disk."""
    text = f"""g ({kind}[n, 32] x) => ({kind}[n, 32] y) <int64[1] last = {{1}}, int64[2] size = {{32, 48}}> {{
        {body}  u = MatMul(x, m)  h = Relu(u)  y = MatMul(h, down) }}"""
    shapes = {"w": (32, 48), "half": (32, 24), "flat": (32 * 48,), "gain": (32, 1), "row": (1, 48), "g": (48,)}
    shapes |= {"column": (48, 1), "eps": (), "down": (48, 32)}
    dtype = ir.DataType[kind.upper()]
    generator = np.random.default_rng(seed)
    weights = {name: generator.uniform(0.1, 1, shape).astype(dtype.numpy()) for name, shape in shapes.items()}
    model = parsed(text, weights)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    source = load(path)
    (mlp,) = find_subgraphs(source)
    assert (mlp.kind, mlp.unsupported) == ("mlp", None)
    assert {node.op_type for node in source.graph} <= {"MatMul", "Relu", "Transpose"}
    assert mlp.blocks[0].mlp.up.weight.dtype == dtype
    tensors = {type(value.const_value) for value in source.graph.initializers.values()}
    assert tensors == {ir.ExternalTensor, ir.LazyTensor}
    write(source.ir_model, tmp_path / "folded.onnx")
    x = generator.standard_normal((5, 32)).astype(np.float16 if kind == "float16" else np.float32)
    found, expected = (run(widen(onnx.load(file)), x)[0] for file in (tmp_path / "folded.onnx", path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=precision * np.abs(expected).max())


def test_weights_that_are_quantized_or_small_stay(tmp_path: Path, seed: int) -> None:
    """Neither integers nor what is rounded become floats, nor a vector a matrix."""
    text = """g (float[n, 32] x) => (float[n, 32] y) <int64[2] size = {32, 32}> {
        c = Cast<to = 1>(w8) m = Mul(c, scale) a = MatMul(x, m)
        r = Round(w) p = Mul(r, scale) b = MatMul(a, p)
        e = Expand(scale, size) y = MatMul(b, e) }"""
    codes = np.random.default_rng(seed).integers(-9, 9, (32, 32), np.int8)
    model = parsed(text, {"w8": codes, "w": (32, 32), "scale": (32,)}, seed)
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    assert [node.op_type for node in source.graph] == [node.op_type for node in model.graph.node]


def test_unsorted_in_a_body(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x, bool flag) => (float[2] y) {
        r = If (flag) <then_branch = t () => (float[2] a) { a = Relu(late) },
                       else_branch = e () => (float[2] b) { b = Neg(x) }>
        late = Neg(x)  y = Add(r, late)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"\(Relu\) reads 'late', which nothing before it produces"):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize(("opset", "of_function"), [(21, 21), (21, 22), (17, 18)])
def test_functions_are_inlined(opset: int, of_function: int, tmp_path: Path) -> None:
    """A model-local function, as dynamo can write them, hides nothing from the passes, whatever its opset."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}, "local": 1]>
    g (float[2, 16] x) => (float[2, 16] y) {{ a = local.dense(x, w1)  r = Relu(a)  y = local.dense(r, w2) }}
    <domain: "local", opset_import: ["": {of_function}]> dense (x, w) => (y) {{
        t = Transpose<perm = [1, 0]>(w)  y = MatMul(x, t) }}"""
    onnx.save(parsed(text, {"w1": (16, 16), "w2": (16, 16)}), tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    assert sorted(node.op_type for node in source.graph) == ["MatMul", "MatMul", "Relu", "Transpose", "Transpose"]
    assert all(node.name for node in source.graph)
