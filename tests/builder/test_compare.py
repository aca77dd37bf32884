"""compare-engine: metrics against NumPy, any two sides, thresholds, samples to replay, models that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, parser
from typer.testing import CliRunner

from onnx_models import moe_spellings
from trt_nvfp4.builder import bundle, errors, runtime
from trt_nvfp4.builder.agreement import Agreement, Thresholds
from trt_nvfp4.builder.backend import local_compute_capability
from trt_nvfp4.builder.cli.compare_engine import app
from trt_nvfp4.builder.compare import Comparison, compare
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.plugin_comparison import compare_plugins
from trt_nvfp4.builder.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.sides import Side, session
from trt_nvfp4.builder.targets import arch_of, find_target
from trt_nvfp4.calibration.samples import InputSpec, input_specs, load_samples
from trt_nvfp4.graph_passes.find import find_subgraphs
from trt_nvfp4.graph_passes.plan import make_plan
from trt_nvfp4.graph_passes.rewrite import rewrite
from trt_nvfp4.graph_passes.source import load
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.library import build_library
from trt_nvfp4.plugins.ops import OPS


def rewritten(model: Path) -> Path:
    """`o.rewritten.onnx` and `o.plan.yaml` beside the model, weights in NVFP4."""
    source = load(model)
    plan = make_plan(source, find_subgraphs(source), find_target("rtx-blackwell").capabilities)
    plan.save(model.with_name("o.plan.yaml"))
    return rewrite(source, plan, None, model.with_name("o.rewritten.onnx")).path


def bundled(model: Path) -> Path:
    """A bundle of the rewritten model, without its plugin library."""
    folder = model.with_name("bundle")
    folder.mkdir()
    bundle.write_folder(folder, find_target("thor"), rewritten(model), [], {}, None, keep=True)
    return folder


def at_random(model: Path, count: int, rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return random_samples(input_specs(model), vocabulary(model), count, rng, shapes)


def compared(reference: Path, result: Path, count: int, rng: np.random.Generator, **options: Any) -> Comparison:
    def samples(specs: Mapping[str, InputSpec]) -> list[dict[str, Any]]:
        return random_samples(specs, {}, count, rng, {"x": (3, 64)})

    return compare(Side.of(reference), Side.of(result), samples, **options)


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_rewritten_model_is_near_the_original(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    found = compared(model, rewritten(model), 2, rng)
    assert sorted(row.kind for row in found.agreements) == ["output", "subgraph", "subgraph"]
    for row in found.agreements:
        # Every NVFP4 weight matrix leaves about 20 dB; exact agreement would mean that nothing was replaced.
        assert 10 < row.sqnr_db < 30, row
        assert 0.95 < row.cosine < 1, row
        assert row.max_abs > 0


def test_subgraphs_are_known_without_a_plan_file(gated_mlps: Path, rng: np.random.Generator) -> None:
    result = rewritten(gated_mlps)
    with_plan = compared(gated_mlps, result, 1, rng)
    gated_mlps.with_name("o.plan.yaml").unlink()
    without = compared(gated_mlps, result, 1, rng)
    assert {row.name for row in without.agreements} == {row.name for row in with_plan.agreements}
    assert len(without.agreements) == 3


def test_bundle_computes_what_its_rewritten_model_computes(gated_mlps: Path, rng: np.random.Generator) -> None:
    folder = bundled(gated_mlps)
    found = compared(gated_mlps.with_name("o.rewritten.onnx"), folder, 2, rng)
    assert len(found.agreements) == 3
    assert all(row.max_abs == 0 and row.sqnr_db == np.inf for row in found.agreements)
    (folder / "model.onnx").write_bytes(b"changed")
    with pytest.raises(BuilderError, match=r"model\.onnx missing or changed since the bundle was written") as failure:
        Side.of(folder)
    assert failure.value.exit_code == errors.USAGE


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
    result = rewritten(gated_mlps)
    found = compared(gated_mlps, result, 2, rng, thresholds=thresholds)
    assert found.failures == [f"output y1, sample {number}: {asked} is not met" for number in range(2)]
    everything = compared(gated_mlps, result, 1, rng, thresholds=thresholds, judge_subgraphs=True)
    assert len(everything.failures) == 3
    assert not compared(result, result, 2, rng, thresholds=thresholds, judge_subgraphs=True).failures


def test_thresholds_cut_where_they_say(gated_mlps: Path, rng: np.random.Generator) -> None:
    result = rewritten(gated_mlps)
    samples = at_random(gated_mlps, 2, rng, x=(3, 64))
    row = _output(_on(gated_mlps, result, samples))
    assert not _on(gated_mlps, result, samples, Thresholds(min_cosine=row.cosine - 1e-4)).failures
    assert _on(gated_mlps, result, samples, Thresholds(min_cosine=row.cosine + 1e-4)).failures
    assert not _on(gated_mlps, result, samples, Thresholds(max_abs=row.max_abs * 1.01)).failures
    assert _on(gated_mlps, result, samples, Thresholds(max_abs=row.max_abs * 0.99)).failures


def _output(found: Comparison) -> Agreement:
    (row,) = [row for row in found.agreements if row.kind == "output"]
    return row


def _on(
    reference: Path, result: Path, samples: list[dict[str, Any]], thresholds: Thresholds | None = None
) -> Comparison:
    return compare(Side.of(reference), Side.of(result), lambda specs: samples, thresholds)


def _ending_in(model: Path, tensor: str) -> Path:
    """The same model with this tensor as its only output."""
    proto = onnx.load(model, load_external_data=False)
    proto.graph.output[0].name = tensor
    onnx.save(proto, model)
    return model


def _computing(path: Path, output: str, body: str, x: str = "float[n, 8]") -> Path:
    """A model of x and y, which has the type `output` and is what `body` makes of x."""
    onnx.save(
        parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({x} x) => ({output} y) {{ {body} }}'), path
    )
    return path


NEGATED = "y = Neg(x)"
KL_SAYS_NOTHING = "KL says nothing of integers, nor where the last axis has fewer than two entries"
POSITIVE = "zero = Constant<value = float {0}>() y = Greater(x, zero)"
LARGE = "y = Constant<value_ints = [4611686018427387904]>()"
LARGE_HALF = "z = Constant<value_floats = [60000.0]>() y = Cast<to = 10>(z)"


@pytest.mark.parametrize(
    ("output", "bodies", "thresholds", "missed"),
    [
        ("int64[1]", (LARGE, LARGE.replace("[4", "[-4")), Thresholds(min_cosine=0.9, max_abs=1e3), 2),
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
    first, second = (_computing(tmp_path / f"{i}.onnx", output, body) for i, body in enumerate(bodies))
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
    left_out = "thresholds are asked of floating-point outputs alone, and not of i (87.50% of its values are equal)"
    assert found.warnings == [left_out]
    assert _on(sides[0], sides[1], samples, Thresholds(max_abs=1e-6)).failures[0].startswith("output y, sample 0")
    assert not _on(sides[0], sides[1], samples).warnings


@pytest.mark.parametrize(("output", "cast"), [("int64[n, 8]", 7), ("bool[n, 8]", 9), ("float16[n, 8]", 10)])
def test_kl_is_asked_of_floating_point_alone(tmp_path: Path, rng: np.random.Generator, output: str, cast: int) -> None:
    """Token ids and masks are no logits."""
    bodies = f"y = Cast<to = {cast}>(x)", f"r = Relu(x) y = Cast<to = {cast}>(r)"
    first, second = (_computing(tmp_path / f"{i}.onnx", output, body) for i, body in enumerate(bodies))
    x = (3 * rng.standard_normal((3, 8))).astype(np.float32)
    found = _on(first, second, [{"x": x}], Thresholds(max_kl=0))
    assert (found.agreements[0].kl is None) == (cast != 10)
    assert len(found.failures) == (cast == 10)
    warned = [text for text in found.warnings if text == f"{KL_SAYS_NOTHING}: y"]
    assert len(warned) == (cast != 10)


def test_equal_outputs_meet_every_threshold(tmp_path: Path, rng: np.random.Generator) -> None:
    """Also where a rounding error makes the cosine less than 1, and where they hold nothing."""
    samples = [{"x": rng.standard_normal((n, 8)).astype(np.float32)} for n in range(1, 40)]
    strict = Thresholds(min_cosine=1, min_sqnr=200, max_abs=0, max_rel=0, max_kl=0)
    same = _computing(tmp_path / "same.onnx", "float[n, 8]", NEGATED)
    assert not _on(same, same, samples, strict).failures
    cut = "i = Constant<value_ints = [0]>() y = Slice(x, i, i)"
    empty = _computing(tmp_path / "empty.onnx", "float[m, 8]", cut)
    assert not _on(empty, empty, samples[:2], strict).failures


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_what_is_not_finite_is_said_and_meets_nothing(tmp_path: Path, rng: np.random.Generator, value: str) -> None:
    broken = _computing(tmp_path / "broken.onnx", "float[n, 8]", "y = Div(x, x)" if value == "NaN" else "y = Exp(x)")
    sound = _computing(tmp_path / "sound.onnx", "float[n, 8]", NEGATED)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    x[1, 2] = 0 if value == "NaN" else 1e4
    for sides in ((broken, sound), (sound, broken), (broken, broken)):
        found = _on(*sides, [{"x": x}], Thresholds(min_cosine=-1, max_abs=1e9))
        assert len(found.failures) == 2
        assert "NaN or infinite in one of the two, or in both: y" in found.warnings


def test_what_is_no_number_is_not_compared(tmp_path: Path, rng: np.random.Generator) -> None:
    samples = [{"x": rng.standard_normal((3, 8)).astype(np.float32)}]
    for output, body in (("string[n, 8]", "y = Cast<to = 8>(x)"), ("seq(float[n, 8])", "y = SequenceConstruct(x, x)")):
        model = _computing(tmp_path / "m.onnx", output, body)
        with pytest.raises(BuilderError, match=r"m\.onnx: output y is not a tensor of real numbers") as failure:
            _on(model, model, samples)
        assert failure.value.exit_code == errors.USAGE


def test_outputs_whose_size_depends_on_values(tmp_path: Path, rng: np.random.Generator) -> None:
    """What finds more than its reference is off, and no other model."""
    few, many = (
        _computing(
            tmp_path / f"{name}.onnx",
            "int64[2, m]",
            f"t = Constant<value = float {{{threshold}}}>() above = Greater(x, t) y = NonZero(above)",
        )
        for name, threshold in (("few", 6.5), ("many", 4.5))
    )
    samples = [{"x": rng.permutation(np.arange(8, dtype=np.float32))[None]}]
    with pytest.raises(BuilderError, match=r"output y, sample 0: shape \[2, 1\] in .*few\.onnx, \[2, 3\]") as failure:
        _on(few, many, samples)
    assert failure.value.exit_code == errors.VERIFICATION_FAILED


def test_output_of_a_subgraph_is_judged_as_an_output(
    gated_mlps: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = _ending_in(gated_mlps, "d1")
    result = rewritten(model)
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
    assert found.failures == [f"output d1, sample {number}: cosine >= 0.99999 is not met" for number in range(4)]
    (file,) = found.save_worst(tmp_path / "worst")
    assert file.name == f"sample-{output.worst_sample:05}.npz"


def test_worst_sample_is_kept_for_replay(gated_mlps: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    result = rewritten(gated_mlps)
    samples = at_random(gated_mlps, 5, rng, x=(3, 64))
    one_by_one = [_output(_on(gated_mlps, result, [sample])).cosine for sample in samples]
    worst = int(np.argmin(one_by_one))
    found = _on(gated_mlps, result, samples)
    (file,) = found.save_worst(tmp_path / "worst")
    assert file.name == f"sample-{worst:05}.npz"
    (again,) = load_samples(tmp_path / "worst", input_specs(gated_mlps))
    assert np.array_equal(again["x"], samples[worst]["x"])
    assert _output(_on(gated_mlps, result, [again])).cosine == _output(found).cosine == min(one_by_one)


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
        with pytest.raises(BuilderError, match=f"not the same model: the {what} of .* are {old}, .* {new}") as failure:
            compared(gated_mlps, other, 1, rng)
        assert failure.value.exit_code == errors.USAGE
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
    for name, message in (
        ("truncated.onnx", "not an ONNX"),
        ("folder", "not a bundle"),
        ("notes.txt", "expected an ONNX file, an engine"),
        ("none.onnx", "no such file"),
    ):
        with pytest.raises(BuilderError, match=message):
            Side.of(tmp_path / name)


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

    monkeypatch.setattr(runtime.backend, "local_compute_capability", lambda: (11, 0))
    monkeypatch.setattr(runtime.backend, "Backend", Loader)
    monkeypatch.setattr(runtime.backend, "logger", lambda trt: Log())
    expected = r"built by tensorrt 10\.13\.3 for thor; tensorrt 11\.4\.0 on this GPU cannot load it: .* not compatible"
    with pytest.raises(BuilderError, match=expected) as failure:
        compared(gated_mlps, engine, 1, rng)
    assert failure.value.exit_code == errors.UNAVAILABLE


@pytest.mark.skipif(local_compute_capability() is not None, reason="a GPU is here")
def test_engine_without_a_gpu_names_the_way_out(gated_mlps: Path) -> None:
    rewritten(gated_mlps)
    engine = gated_mlps.with_name("o.engine")
    engine.write_bytes(b"engine")
    shown = CliRunner().invoke(app, [str(gated_mlps), str(engine)])
    assert shown.exit_code == errors.UNAVAILABLE
    assert "none is here" in shown.stderr
    assert "o.rewritten.onnx computes the same without one" in shown.stderr


class ReferenceHost:
    """Stands for the plugin host on a machine without a GPU: computes by the ops' Torch references."""

    @contextmanager
    def session(self, op: str, inputs: list[torch.Tensor], attributes: dict[str, Any]) -> Iterator[ReferenceHost]:
        self.op, self.attributes = op, attributes
        yield self

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [OPS[self.op].reference(*inputs, **self.attributes)]


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_plugins_get_what_their_bodies_get(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    samples = at_random(model, 2, rng, x=(9, 64))
    rows = compare_plugins(rewritten(model), samples, ReferenceHost(), device="cpu")
    assert [row.name for row in rows] == ["gated_mlp_0", "gated_mlp_1"]
    # Rounding to 16 bits differs: ONNX Runtime computes bfloat16 in float32.
    assert all(row.sqnr_db > (40 if elem_type == TensorProto.BFLOAT16 else 60) for row in rows), rows


def test_plugins_get_what_the_model_computes(tmp_path: Path, rng: np.random.Generator) -> None:
    """An MoE block's router logits, which are no constant either."""
    moe_spellings.export(moe_spellings.Moe(moe_spellings.MoeSpec()), tmp_path / "m.onnx", 0)
    model = rewritten(tmp_path / "m.onnx")
    (row,) = compare_plugins(model, at_random(model, 2, rng, x=(2, 5, 64)), ReferenceHost(), device="cpu")
    assert row.sqnr_db > 60


@pytest.mark.gpu
def test_plugins_on_the_gpu(gated_mlps: Path, rng: np.random.Generator) -> None:
    capability = local_compute_capability()
    assert capability is not None
    host = PluginHost(build_library(arch_of(capability)))
    samples = at_random(gated_mlps, 2, rng, x=(9, 64))
    rows = compare_plugins(rewritten(gated_mlps), samples, host)
    assert all(row.sqnr_db > 50 for row in rows), rows


def test_relu_in_front_of_what_quantizes_is_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    """ONNX Runtime drops it, which is right for unsigned integers alone."""
    body = """scale = Constant<value_float = 0.1>() positive = Relu(x)
        codes = QuantizeLinear(positive, scale, zero) y = DequantizeLinear(codes, scale, zero)"""
    path = _computing(tmp_path / "m.onnx", "float[n, 8]", body)
    model = onnx.load(path)
    model.graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    onnx.save(model, path)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    (y,) = session(path).run(None, {"x": x})
    expected = (torch.from_numpy(x).relu() / 0.1).to(torch.float8_e4m3fn).float() * 0.1
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5)


def test_command(gated_mlps: Path, tmp_path: Path) -> None:
    result = rewritten(gated_mlps)
    shown = CliRunner().invoke(app, [str(gated_mlps), str(result), "--json", "--kl"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["reference"]["kind"] == "onnx"
    assert found["result"]["kind"] == "rewritten"
    assert found["samples"] == 4
    assert {row["kind"] for row in found["tensors"]} == {"output", "subgraph"}
    assert all(0 < row["kl"] < 0.1 and 0.9 < row["cosine"] < 1 for row in found["tensors"])

    table = CliRunner().invoke(app, [str(gated_mlps), str(result), "--samples", "1"])
    assert table.exit_code == 0, table.output
    assert "gated_mlp_1" in table.stdout


def test_command_fails_below_a_threshold_and_saves_what_to_replay(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), str(rewritten(gated_mlps)), "--min-cosine", "0.99999"]
    worst = tmp_path / "worst"
    strict = CliRunner().invoke(app, [*arguments, "--json", "--save-worst", str(worst)])
    assert strict.exit_code == errors.VERIFICATION_FAILED
    found = json.loads(strict.stdout)
    assert len(found["failures"]) == 4
    assert "cosine >= 0.99999 is not met" in strict.stderr
    assert found["worst_samples"] == [str(file) for file in sorted(worst.iterdir())]

    replay = found["replay"].split()
    assert replay[0] == "compare-engine"
    again = CliRunner().invoke(app, [*replay[1:], "--json"])
    assert again.exit_code == 0, again.output
    cosines = [
        [row["cosine"] for row in run["tensors"] if row["kind"] == "output"]
        for run in (found, json.loads(again.stdout))
    ]
    assert cosines[0] == cosines[1]

    occupied = CliRunner().invoke(app, [*arguments, "--save-worst", str(worst)])
    assert occupied.exit_code == errors.USAGE
    assert "not empty" in occupied.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-abs", "nan"], "--max-abs nan: expected a number from 0 to inf"),
        (["--max-rel", "-1"], "--max-rel -1.0: expected a number from 0 to inf"),
        (["--min-cosine", "1.5"], "--min-cosine 1.5: expected a number from -1 to 1"),
        (["--min-sqnr", "nan"], "--min-sqnr nan: expected a number"),
        (["--seed", "-1"], "--seed"),
        (["--save-worst", "model.onnx"], "--save-worst model.onnx: a file is there"),
        (["--plan", "o.plan.yaml"], "none of its replaced subgraphs can be seen in both"),
    ],
)
def test_command_refuses_what_cannot_be_met(
    gated_mlps: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten(gated_mlps)
    monkeypatch.chdir(gated_mlps.parent)
    shown = CliRunner().invoke(app, ["model.onnx", "model.onnx", *options])
    assert shown.exit_code == errors.USAGE, shown.output
    assert message in shown.stderr


def test_command_says_where_an_option_has_no_effect(tmp_path: Path) -> None:
    """KL of single entries is 0 whatever they are, and a model without replaced subgraphs has none to check."""
    model = _computing(tmp_path / "m.onnx", "float[n, 1]", "i = Constant<value_ints = [1]>() y = ReduceMax(x, i)")
    shown = CliRunner().invoke(app, [str(model), str(model), "--max-kl", "0.1", "--check", "all", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["warnings"] == [
        f"{KL_SAYS_NOTHING}: y",
        "no replaced subgraph can be seen in both: outputs alone are compared",
    ]


def test_command_says_a_failure_once(tmp_path: Path) -> None:
    model = _computing(tmp_path / "m.onnx", "string[n]", "y = Identity(x)", x="string[n]")
    shown = CliRunner().invoke(app, [str(model), str(model), "--json"])
    assert json.loads(shown.stdout)["exit_code"] == shown.exit_code == errors.USAGE
    assert shown.stderr.count("Received unexpected dtype") == 1


def test_command_saves_inputs_of_any_name(tmp_path: Path) -> None:
    """Also those that NumPy's savez has arguments of."""
    model = '<ir_version: 10, opset_import: ["": 21]> g (float[n, 8] file, float[n, 8] allow_pickle) => (float[n, 8] y)'
    onnx.save(parser.parse_model(f"{model} {{ y = Add(file, allow_pickle) }}"), tmp_path / "m.onnx")
    arguments = [str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx")]
    shown = CliRunner().invoke(app, [*arguments, "--save-worst", str(tmp_path / "worst")])
    assert shown.exit_code == 0, shown.output
    again = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "worst")])
    assert again.exit_code == 0, again.output


def test_command_says_that_inputs_which_do_not_fit_were_random(tmp_path: Path) -> None:
    """As of a decoder whose mask covers the cache and the new tokens, under a name that does not say so."""
    inputs = "float[1, sequence_length] x, float[1, past_length] past, float[1, kv_length] mask"
    body = "all = Concat<axis = 1>(past, x) y = Mul(all, mask)"
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float[1, m] y) {{ {body} }}'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    arguments = [str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == errors.BUILD_FAILED
    advice = "; the inputs were random, of typical shapes: give samples with --data FILE|DIR, or shapes that fit"
    assert advice in shown.stderr

    fitting = CliRunner().invoke(app, [*arguments, "--shapes", "x:1x3,past:1x5,mask:1x8"])
    assert fitting.exit_code == 0, fitting.output

    arrays = {name: np.ones((1, length), np.float32) for name, length in (("x", 3), ("past", 5), ("mask", 7))}
    np.savez(tmp_path / "s.npz", **arrays)
    given = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "s.npz")])
    assert given.exit_code == errors.BUILD_FAILED
    assert "random" not in given.stderr


@pytest.mark.parametrize("manifest", ["{", "[]", "{}", '{"checksums": {}, "name": "a web application"}'])
def test_folders_that_are_no_bundle(gated_mlps: Path, tmp_path: Path, manifest: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(BuilderError, match=r"not a bundle|not JSON") as failure:
        Side.of(folder)
    assert failure.value.exit_code == errors.USAGE


def test_command_takes_given_samples_or_random_ones(gated_mlps: Path, tmp_path: Path) -> None:
    given = [str(gated_mlps), str(gated_mlps), "--data", str(tmp_path)]
    for options in (["--shapes", "x:1x64"], ["--samples", "4"], ["--seed", "0"]):
        shown = CliRunner().invoke(app, [*given, *options])
        assert shown.exit_code == errors.USAGE
        assert f"{options[0]} would make random samples instead" in shown.stderr


def test_command_on_zeros_warns(gated_mlps: Path, tmp_path: Path) -> None:
    """Of what is 0 in every sample alone; an MLP without bias gives 0 for 0."""
    model, result, arguments = gated_mlps, rewritten(gated_mlps), ["--data", str(tmp_path / "data"), "--json"]
    (tmp_path / "data").mkdir()
    samples = np.zeros((2, 64), np.float16)
    np.save(tmp_path / "data" / "x.npy", samples)
    shown = CliRunner().invoke(app, [str(model), str(result), *arguments])
    assert shown.exit_code == 0, shown.output
    for said in ("warning: every input is 0 in every sample", "warning: the reference is 0 in every sample", "mlp_1"):
        assert said in shown.stderr
    assert len(json.loads(shown.stdout)["warnings"]) == 2
    samples[1, 5] = 1
    np.save(tmp_path / "data" / "x.npy", samples)
    shown = CliRunner().invoke(app, [str(model), str(result), *arguments])
    assert "warning" not in shown.stderr
    assert json.loads(shown.stdout)["warnings"] == []


def test_command_on_empty_data(gated_mlps: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "empty" / "x.npy", np.zeros((0, 64), np.float16))
    shown = CliRunner().invoke(app, [str(gated_mlps), str(rewritten(gated_mlps)), "--data", str(tmp_path / "empty")])
    assert shown.exit_code == errors.USAGE
    assert "holds no sample" in shown.stderr
