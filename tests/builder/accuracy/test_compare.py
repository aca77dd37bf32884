"""Comparing any two sides: metrics against NumPy, thresholds, samples to replay, models that differ."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, parser

from onnx_models.graphs import Graph, save_model, spec
from onnx_models.passes import plan_all, rewritten_file
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.accuracy.compare import Comparison, compare
from trt_nvfp4.builder.accuracy.metrics import Agreement, Thresholds
from trt_nvfp4.builder.accuracy.runners import ModelRunner
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UnavailableError, UsageError, VerificationError
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import bundle
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.rewrite import rewrite


def bundled(model: Path) -> Path:
    """A bundle of the rewritten model, without its plugin library."""
    folder = model.with_name("bundle")
    folder.mkdir()
    bundle.write_folder(
        folder, find_target("thor"), rewritten_file(model), [], [], options=bundle.FolderOptions(keep=True)
    )
    return folder


def at_random(model: Path, count: int, rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return random_samples(input_specs(model), vocabulary(model), count, rng, shapes)


def compared(reference: Path, result: Path, count: int, rng: np.random.Generator, **options: Any) -> Comparison:
    def samples(specs: Mapping[str, InputSpec]) -> list[dict[str, Any]]:
        return random_samples(specs, {}, count, rng, {"x": (3, 64)})

    return compare(ModelRunner.of(reference), ModelRunner.of(result), samples, **options)


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_rewritten_model_is_near_the_original(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    found = compared(model, rewritten_file(model), 2, rng)
    assert sorted(row.kind for row in found.agreements) == ["output", "subgraph", "subgraph"]
    for row in found.agreements:
        # Every NVFP4 weight matrix leaves about 20 dB; exact agreement would mean that nothing was replaced.
        assert 10 < row.sqnr_db < 30, row
        assert 0.95 < row.cosine < 1, row
        assert row.max_abs > 0


@pytest.mark.parametrize("with_plan", [False, True])
def test_joined_linears_are_compared_one_by_one(with_plan: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    graph = Graph(spec(k=64))
    outputs = [graph.op("Neg", [graph.linear("x", f"{name}_w", 64, 32, name)], f"{name}_y") for name in "qkv"]
    onnx.save(graph.model(outputs, rank=2), tmp_path / "m.onnx")
    source = load(tmp_path / "m.onnx")
    plan = plan_all(source)
    if with_plan:
        plan.save(tmp_path / "o.plan.yaml")
    result = rewrite(source, plan, None, tmp_path / "o.rewritten.onnx").path
    rows = [row for row in compared(source.path, result, 1, rng).agreements if row.kind == "subgraph"]
    assert sorted(row.name for row in rows) == [f"{plan.subgraphs[0].name}: {name}" for name in "kqv"]
    assert all(0.95 < row.cosine < 1 for row in rows)


def test_plan_of_another_run_is_refused(gated_mlps: Path, rng: np.random.Generator) -> None:
    """It would leave a subgraph out that the model holds replaced."""
    result = rewritten_file(gated_mlps)
    beside = gated_mlps.with_name("o.plan.yaml")
    beside.write_text(beside.read_text().replace("decision: nvfp4_w4a16", "decision: keep", 1))
    with pytest.raises(UsageError, match=r"another plan than .*o\.plan\.yaml: gated_mlp_0 is nvfp4_w4a16"):
        compared(gated_mlps, result, 1, rng, thresholds=Thresholds(min_cosine=0.9), judge_subgraphs=True)


def test_bundle_computes_what_its_rewritten_model_computes(gated_mlps: Path, rng: np.random.Generator) -> None:
    folder = bundled(gated_mlps)
    found = compared(gated_mlps.with_name("o.rewritten.onnx"), folder, 2, rng)
    assert len(found.agreements) == 3
    assert all(row.max_abs == 0 and row.sqnr_db == np.inf for row in found.agreements)
    (folder / "model.onnx").write_bytes(b"changed")
    with pytest.raises(ModelFaultError, match=r"model\.onnx missing or changed since the bundle was written"):
        ModelRunner.of(folder)


@pytest.mark.parametrize(
    ("thresholds", "asked"),
    [
        (Thresholds(min_cosine=0.99999), "cosine >= 0.99999"),
        (Thresholds(min_sqnr=40.0), "SQNR >= 40.0 dB"),
        (Thresholds(max_abs=1e-6), "max abs <= 1e-06"),
        (Thresholds(max_rel=1e-6), "max rel <= 1e-06"),
        (Thresholds(max_kl=1e-9), "KL <= 1e-09"),
    ],
)
def test_thresholds(gated_mlps: Path, rng: np.random.Generator, thresholds: Thresholds, asked: str) -> None:
    result = rewritten_file(gated_mlps)
    found = compared(gated_mlps, result, 2, rng, thresholds=thresholds)
    said = [failure.rpartition(": ") for failure in found.failures]
    assert [what for what, _, _ in said] == [f"output y1, sample {number}: {asked} is not met" for number in range(2)]
    assert all(np.isfinite(float(reached.removesuffix(" dB"))) for _, _, reached in said)
    everything = compared(gated_mlps, result, 1, rng, thresholds=thresholds, judge_subgraphs=True)
    assert len(everything.failures) == 3
    assert not compared(result, result, 2, rng, thresholds=thresholds, judge_subgraphs=True).failures


def test_thresholds_take_the_first_side_for_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    """SQNR and KL of x against 2 x are not those of 2 x against x."""
    twice = "two = Constant<value = float {2}>() y = Mul(x, two)"
    one, two = (save_model(tmp_path / f"{i}.onnx", "float[n, 8]", b) for i, b in enumerate(("y = Identity(x)", twice)))
    x = rng.standard_normal((3, 8)).astype(np.float32)
    p, q = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (x, 2 * x))
    forth, back = (float((a.exp() * (a - b)).sum(-1).mean()) for a, b in ((p, q), (q, p)))
    between = Thresholds(max_kl=(forth + back) / 2)
    assert bool(_on(one, two, [{"x": x}], between).failures) == (forth > back)
    assert bool(_on(two, one, [{"x": x}], between).failures) == (back > forth)
    assert _on(one, two, [{"x": x}], Thresholds(min_sqnr=3)).failures  # 0 dB
    assert not _on(two, one, [{"x": x}], Thresholds(min_sqnr=3)).failures  # 6 dB


def _output(found: Comparison) -> Agreement:
    (row,) = [row for row in found.agreements if row.kind == "output"]
    return row


def _on(
    reference: Path, result: Path, samples: list[dict[str, Any]], thresholds: Thresholds | None = None
) -> Comparison:
    return compare(ModelRunner.of(reference), ModelRunner.of(result), lambda specs: samples, thresholds)


def _ending_in(model: Path, tensor: str) -> Path:
    """The same model with this tensor as its only output."""
    proto = onnx.load(model, load_external_data=False)
    proto.graph.output[0].name = tensor
    onnx.save(proto, model)
    return model


NEGATED = "y = Neg(x)"
KL_SAYS_NOTHING = "KL says nothing of integers, nor where the last axis has fewer than two entries"
POSITIVE = "zero = Constant<value = float {0}>() y = Greater(x, zero)"
LARGE = "y = Constant<value_ints = [4611686018427387904]>()"
LARGE_HALF = "z = Constant<value_floats = [60000.0]>() y = Cast<to = 10>(z)"


@pytest.mark.parametrize(
    ("output", "bodies", "thresholds", "missed"),
    [
        ("int64[1]", (LARGE, LARGE.replace("[4", "[-4")), Thresholds(min_cosine=0.9, max_abs=1e3), 2),
        ("int64[1]", (LARGE, LARGE.replace("4]", "5]")), Thresholds(max_abs=0, max_rel=0), 2),
        ("int64[1]", (LARGE, LARGE.replace("4]", "5]")), Thresholds(min_cosine=0.9, max_rel=1e-15), 0),
        ("bool[n, 8]", (POSITIVE, POSITIVE.replace("Greater", "Less")), Thresholds(min_sqnr=20), 1),
        ("bool[n, 8]", (POSITIVE, POSITIVE), Thresholds(min_sqnr=20), 0),
        ("float16[1]", (LARGE_HALF, LARGE_HALF.replace("[6", "[-6")), Thresholds(max_abs=1.3e5), 0),
        ("float16[1]", (LARGE_HALF, LARGE_HALF.replace("[6", "[-6")), Thresholds(max_abs=1.1e5), 1),
    ],
)
def test_thresholds_are_asked_of_every_type(
    tmp_path: Path, rng: np.random.Generator, output: str, bodies: tuple[str, str], thresholds: Thresholds, missed: int
) -> None:
    """Differences of integers could wrap around, of float16 overflow, and booleans have none."""
    first, second = (save_model(tmp_path / f"{i}.onnx", output, body) for i, body in enumerate(bodies))
    samples = [{"x": rng.standard_normal((3, 8)).astype(np.float32)}]
    assert len(_on(first, second, samples, thresholds).failures) == missed


def test_integers_beside_other_outputs_are_left_out(tmp_path: Path, rng: np.random.Generator) -> None:
    """Indices of nearly equal scores change places: the warning says how many, and no threshold is asked."""
    sides = []
    for name, factor in (("a", 1.0), ("b", 1.001)):
        body = f"f = Constant<value = float {{{factor}}}>() y = Mul(x, f) i = Cast<to = 7>(y)"
        model = f'<ir_version: 10, opset_import: ["": 21]> g (float[8] x) => (int64[8] i, float[8] y) {{ {body} }}'
        sides.append(tmp_path / f"{name}.onnx")
        onnx.save(parser.parse_model(model), sides[-1])
    x = np.array([0.9995, 0, 0, 0, 0, 0, 0, 0], np.float32)
    samples = [{"x": x}, {"x": np.roll(x, 1) + 1}]
    found = _on(sides[0], sides[1], samples, Thresholds(min_cosine=0.99, min_sqnr=20, max_abs=0.01, max_rel=0.01))
    assert found.failures == []
    left_out = "thresholds apply only to floating-point outputs, not to i (87.50% of its values are equal)"
    assert found.warnings == [left_out]
    assert _on(sides[0], sides[1], samples, Thresholds(max_abs=1e-6)).failures[0].startswith("output y, sample 0")
    assert not _on(sides[0], sides[1], samples).warnings
    assert _on(sides[0], sides[1], samples, Thresholds(max_kl=1)).warnings == [f"{KL_SAYS_NOTHING}: i"]


@pytest.mark.parametrize(("output", "cast"), [("int64[n, 8]", 7), ("bool[n, 8]", 9), ("float16[n, 8]", 10)])
def test_kl_is_asked_of_floating_point_alone(tmp_path: Path, rng: np.random.Generator, output: str, cast: int) -> None:
    """Token ids and masks are no logits."""
    bodies = f"y = Cast<to = {cast}>(x)", f"r = Relu(x) y = Cast<to = {cast}>(r)"
    first, second = (save_model(tmp_path / f"{i}.onnx", output, body) for i, body in enumerate(bodies))
    x = (3 * rng.standard_normal((3, 8))).astype(np.float32)
    found = compare(ModelRunner.of(first), ModelRunner.of(second), lambda specs: [{"x": x}], with_kl=True)
    assert (found.agreements[0].kl is None) == (cast != 10)
    warned = [text for text in found.warnings if text == f"{KL_SAYS_NOTHING}: y"]
    assert len(warned) == (cast != 10)
    if cast == 10:
        assert len(_on(first, second, [{"x": x}], Thresholds(max_kl=0)).failures) == 1
    else:
        assert_nothing_judged(first, second, [{"x": x}], Thresholds(max_kl=0), "--max-kl 0: none of y can be logits")


def assert_nothing_judged(
    reference: Path, result: Path, samples: list[dict[str, Any]], thresholds: Thresholds, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _on(reference, result, samples, thresholds)


def test_equal_outputs_meet_every_threshold(tmp_path: Path, rng: np.random.Generator) -> None:
    """Also where a rounding error makes the cosine less than 1, and where some hold nothing."""
    samples = [{"x": rng.standard_normal((n, 8)).astype(np.float32)} for n in range(1, 40)]
    strict = Thresholds(min_cosine=1, min_sqnr=200, max_abs=0, max_rel=0, max_kl=0)
    same = save_model(tmp_path / "same.onnx", "float[n, 8]", NEGATED)
    assert not _on(same, same, samples, strict).failures
    positive = "zero = Constant<value = float {0}>() c = Greater(x, zero) cut = Constant<value_ints = [-1]>()"
    flat = f"{positive} flags = Reshape(c, cut) values = Reshape(x, cut) y = Compress(values, flags)"
    some = save_model(tmp_path / "some.onnx", "float[m]", flat)
    samples = [{"x": -np.ones((2, 8), np.float32)}, {"x": np.ones((2, 8), np.float32)}]
    assert not _on(some, some, samples, strict).failures
    assert_nothing_judged(some, some, samples[:1], Thresholds(max_abs=1), "y hold no value in any sample")


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_what_is_not_finite_is_said_and_meets_nothing(tmp_path: Path, rng: np.random.Generator, value: str) -> None:
    broken = save_model(tmp_path / "broken.onnx", "float[n, 8]", "y = Div(x, x)" if value == "NaN" else "y = Exp(x)")
    sound = save_model(tmp_path / "sound.onnx", "float[n, 8]", NEGATED)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    x[1, 2] = 0 if value == "NaN" else 1e4
    for sides in ((broken, sound), (sound, broken), (broken, broken)):
        found = _on(*sides, [{"x": x}], Thresholds(min_cosine=-1, max_abs=1e9))
        assert len(found.failures) == 2
        assert "NaN or infinite in one of the two, or in both: y" in found.warnings


def test_what_is_no_number_is_not_compared(tmp_path: Path, rng: np.random.Generator) -> None:
    samples = [{"x": rng.standard_normal((3, 8)).astype(np.float32)}]
    for output, body in (("string[n, 8]", "y = Cast<to = 8>(x)"), ("seq(float[n, 8])", "y = SequenceConstruct(x, x)")):
        model = save_model(tmp_path / "m.onnx", output, body)
        with pytest.raises(UsageError, match=r"m\.onnx: output y is not a tensor of real numbers"):
            _on(model, model, samples)


def test_outputs_whose_size_depends_on_values(tmp_path: Path, rng: np.random.Generator) -> None:
    """What finds more than its reference is off, and no other model."""
    few, many = (
        save_model(
            tmp_path / f"{name}.onnx",
            "int64[2, m]",
            f"t = Constant<value = float {{{threshold}}}>() above = Greater(x, t) y = NonZero(above)",
        )
        for name, threshold in (("few", 6.5), ("many", 4.5))
    )
    samples = [{"x": rng.permutation(np.arange(8, dtype=np.float32))[None]}]
    with pytest.raises(VerificationError, match=r"output y, sample 0: shape \[2, 1\] in .*few\.onnx, \[2, 3\]"):
        _on(few, many, samples)


def test_output_of_a_subgraph_is_judged_as_an_output(
    gated_mlps: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = _ending_in(gated_mlps, "d1")
    result = rewritten_file(model)
    samples = at_random(model, 4, rng, x=(3, 64))
    found = _on(model, result, samples, Thresholds(min_cosine=0.99999))
    assert sorted((row.kind, row.name) for row in found.agreements) == [
        ("output", "d1"),
        ("subgraph", "gated_mlp_0"),
        ("subgraph", "gated_mlp_1"),
    ]
    output = _output(found)
    expected, actual = (
        np.concatenate([session(side).run(["d1"], sample)[0].ravel() for sample in samples]).astype(np.float64)
        for side in (model, result)
    )
    sqnr = 10 * np.log10((expected**2).sum() / ((expected - actual) ** 2).sum())
    assert output.sqnr_db == pytest.approx(sqnr, rel=1e-9)
    assert [row.sqnr_db for row in found.agreements if row.name == "gated_mlp_1"] == [output.sqnr_db]
    worst = [row.cosine for row in found.agreements if row.kind == "output"]
    starts = [f"output d1, sample {number}: cosine >= 0.99999 is not met: " for number in range(4)]
    assert [failure[: len(start)] for failure, start in zip(found.failures, starts, strict=True)] == starts
    assert f"{min(worst):.6f}" == min(failure.rpartition(" ")[2] for failure in found.failures)
    (file,) = found.save_worst(tmp_path / "worst")
    assert file.name == f"sample-{output.worst_sample:05}.npz"


def _renamed(model: Path, name: str, old: str, new: str) -> Path:
    proto = onnx.load(model, load_external_data=False)
    for values in (proto.graph.input, proto.graph.output):
        for value in values:
            value.name = new if value.name == old else value.name
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if entry == old else entry for entry in names]
    onnx.save(proto, model.with_name(name))
    return model.with_name(name)


def test_models_that_differ(
    gated_mlps: Path, tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator
) -> None:
    for old, new, what in (("x", "z", "inputs"), ("y1", "w", "outputs")):
        other = _renamed(gated_mlps, f"{what}.onnx", old, new)
        with pytest.raises(UsageError, match=f"not the same model: the {what} of .* are {old}, .* {new}"):
            compared(gated_mlps, other, 1, rng)
    wide = save_gated_mlps(tmp_path / "wide.onnx", hidden=128)
    with pytest.raises(BuilderError, match=r"input x is float16 \['tokens', 64\] in .*, float16 \['tokens', 128\]"):
        compared(gated_mlps, wide, 1, rng)
    single = save_gated_mlps(tmp_path / "single.onnx", elem_type=TensorProto.FLOAT)
    with pytest.raises(BuilderError, match=r"input x is float16 .* float32"):
        compared(gated_mlps, single, 1, rng)


def test_what_is_no_model(tmp_path: Path, gated_mlps: Path) -> None:
    (tmp_path / "truncated.onnx").write_bytes(gated_mlps.read_bytes()[:200])
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    for name, message, code in (
        ("truncated.onnx", "not an ONNX", errors.MODEL_AT_FAULT),
        ("folder", "not a bundle", errors.USAGE),
        ("notes.txt", "expected an ONNX file, an engine", errors.USAGE),
        ("none.onnx", "no such file", errors.MODEL_AT_FAULT),
        ("none.engine", "no such file", errors.MODEL_AT_FAULT),
    ):
        with pytest.raises(BuilderError, match=message) as failure:
            ModelRunner.of(tmp_path / name)
        assert failure.value.exit_code == code


class RefusingTensorRT:
    """Stands for TensorRT on a GPU: its runtime refuses the engine as one of another version."""

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, engine: bytes) -> None:
            self.log.errors.append("The engine plan file is not compatible with this version of TensorRT")


def test_engine_of_another_version(
    tmp_path: Path, gated_mlps: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "o.engine"
    engine.write_bytes(b"engine")
    written_by = {"backend": "tensorrt", "versions": {"tensorrt": "10.13.3"}, "target": "thor"}
    (tmp_path / "o.report.json").write_text(json.dumps(written_by))

    class Loader:
        module, version, trt = "tensorrt", "11.4.0", RefusingTensorRT

        def __init__(self, module: str) -> None:
            assert module == "tensorrt"

    class Log:
        def __init__(self) -> None:
            self.errors: list[str] = []

        def last_errors(self) -> str:
            return " | ".join(self.errors)

    monkeypatch.setattr(driver, "local_compute_capability", lambda: (11, 0))
    monkeypatch.setattr(runtime.backend, "Backend", Loader)
    monkeypatch.setattr(runtime.backend, "logger", lambda trt: Log())
    expected = r"built by tensorrt 10\.13\.3 for thor; tensorrt 11\.4\.0 on this GPU cannot load it: .* not compatible"
    with pytest.raises(UnavailableError, match=expected):
        compared(gated_mlps, engine, 1, rng)


@pytest.mark.parametrize("manifest", ["{", "[]", "{}", '{"checksums": {}, "name": "a web application"}'])
def test_folders_that_are_no_bundle(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ModelFaultError if manifest == "{" else UsageError, match=r"not a bundle|not JSON"):
        ModelRunner.of(tmp_path)


@pytest.mark.parametrize(("between", "low", "high"), [("Relu(opposite)", 0, 9), ("Clip(opposite, low, high)", -0.5, 1)])
def test_what_quantizes_comes_behind_relu_and_clip(
    between: str, low: float, high: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    """ONNX Runtime drops the Relu, which is right for unsigned integers alone, and fails at the Clip."""
    body = f"""opposite = Neg(x) between = {between}
        codes = QuantizeLinear(between, scale, zero) y = DequantizeLinear(codes, scale, zero)"""
    path = save_model(tmp_path / "m.onnx", "float[n, 8]", body)
    model = onnx.load(path)
    for name, value in {"low": low, "high": high, "scale": 0.1}.items():
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
    model.graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    onnx.save(model, path)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    (y,) = session(path).run(None, {"x": x})
    expected = (torch.from_numpy(-x).clamp(low, high) / 0.1).to(torch.float8_e4m3fn).float() * 0.1
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5)


def test_weights_that_older_files_list_as_inputs(gated_mlps: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    """Files of IR versions before 4 list all."""
    model = onnx.load(gated_mlps)
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in model.graph.initializer
    )
    onnx.save(model, tmp_path / "older.onnx")
    (row,) = compared(gated_mlps, tmp_path / "older.onnx", 1, rng).agreements
    assert row.max_abs == 0
