"""What can be known before an export or a quantization is said before it, and leaves no file."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

from onnx_models.graphs import parsed
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.export import huggingface
from trt_nvfp4.calibration.samples.samples import input_specs

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")


def build(model: Path, *options: str) -> Result:
    """Into `out/` beside the model."""
    output = model.parent / "out" / "o.engine"
    return CliRunner().invoke(app, [str(model), "-o", str(output), "--target", "rtx-blackwell", *options])


def assert_told(result: Result, code: int, text: str, model: Path) -> None:
    assert result.exit_code == code, result.output
    assert text in " ".join(result.stderr.split())
    assert not (model.parent / "out").exists()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model's directory that nothing exports."""

    def export(*_: object) -> Path:
        raise AssertionError("exported")

    monkeypatch.setattr(huggingface, "export", export)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.ones(1, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("option", ["--calib-data", "--accuracy-data"])
def test_text_without_words_before_an_export(directory: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "text.txt").write_text(" \n\n")
    (tmp_path / "good.npz").write_bytes(b"")
    more = ["--accuracy-budget", "cosine>=0.9", "--calib-data", str(tmp_path / "good.npz")]
    options = more * (option == "--accuracy-data")
    result = build(directory, option, str(tmp_path / "text.txt"), *options)
    assert_told(result, errors.USAGE, "text.txt: holds no text", directory)


def test_a_missing_tokenizer_before_an_export(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words.\n")
    result = build(directory, "--calib-data", str(tmp_path / "text.txt"))
    assert_told(result, errors.USAGE, "tokenizer", directory)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--min-shapes", "inputs_ids:1x8"], "the model has no input 'inputs_ids'; it has input_ids, "),
        (["--opt-shapes", "input_ids:8"], "input_ids:8 does not fit the input's shape [batch, sequence]"),
        (["--min-shapes", "input_ids:3x8", "--max-shapes", "input_ids:2x8"], "min 3, opt 2, max 2 are out of"),
        (["--max-shapes", "input_ids:1x101"], "101 tokens, and the model's configuration allows for 100"),
        (["--cache-capacity", "101"], "allows for 100 tokens"),
        (["--cache-capacity", "50", "--max-shapes", "input_ids:1x51"], "allows for 50"),
        (["--task", "features", "--max-shapes", "past_length:1"], "no input 'past_length'; it has input_ids, att"),
    ],
)
def test_shapes_before_an_export(directory: Path, options: list[str], text: str) -> None:
    assert_told(build(directory, *options), errors.USAGE, text, directory)


def test_samples_before_an_export(directory: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    ids = np.ones((2, 8), np.int64)
    np.savez(samples / "0.npz", input_ids=ids, attention_mask=ids)
    np.savez(samples / "1.npz", input_ids=ids, attention_mask=ids[:1])
    result = build(directory, "--task", "features", "--calib-data", str(samples))
    assert_told(result, errors.USAGE, "1.npz: dimension batch is 2 in input_ids and 1 in attention_mask", directory)


def test_a_later_sample_before_anything_is_quantized(gated_mlps: Path, tmp_path: Path) -> None:
    (samples := tmp_path / "samples").mkdir()
    (spec,) = input_specs(gated_mlps).values()
    shape = tuple(size if isinstance(size, int) else 2 for size in spec.shape)
    for number, dtype in enumerate((spec.dtype, spec.dtype, np.int8)):
        np.savez(samples / f"{number}.npz", **{name: np.ones(shape, dtype) for name in input_specs(gated_mlps)})
    result = build(gated_mlps, "--calib-data", str(samples))
    assert_told(result, errors.USAGE, "2.npz: x must be", gated_mlps)


def test_a_shape_above_a_table_of_positions(tmp_path: Path) -> None:
    """As TorchScript writes BERT: the first rows of a table, as many as tokens, computed from the input's shape."""
    text = """g (float[batch, sequence, 32] x) => (float[batch, sequence, 32] y)
        <int64[1] one = {1}, int64[1] two = {2}, int64[1] zero = {0}> {
            shape = Shape(x)
            tokens = Slice(shape, one, two, zero)
            rows = Slice(table, zero, tokens, one)
            h = Add(x, rows)
            u = MatMul(h, up)
            r = Relu(u)
            d = MatMul(r, down)
            y = Add(h, d)
        }"""
    path = tmp_path / "m.onnx"
    onnx.save(parsed(text, {"table": (1, 16, 32), "up": (32, 64), "down": (64, 32)}), path)
    assert_told(build(path, "--max-shapes", "x:1x17x32"), errors.USAGE, "does not take all shapes", path)
    result = build(path, "--max-shapes", "x:1x16x32", "--opt-shapes", "x:1x16x32", "--stop-after", "plan")
    assert result.exit_code == 0, result.output


def test_dimensions_of_one_name_are_equal(tmp_path: Path) -> None:
    text = """g (float[batch, 32] a, float[batch, 32] b) => (float[batch, 32] y) {
        c = Add(a, b) d = MatMul(c, w) e = Relu(d) y = MatMul(e, w) }"""
    path = tmp_path / "m.onnx"
    onnx.save(parsed(text, {"w": (32, 32)}), path)
    result = build(path, "--opt-shapes", "a:2x32,b:3x32")
    assert_told(result, errors.USAGE, "--opt-shapes: dimension batch is 2 in a and 3 in b", path)
    np.savez(tmp_path / "s.npz", a=np.ones((2, 32), np.float32), b=np.ones((3, 32), np.float32))
    result = build(path, "--calib-data", str(tmp_path / "s.npz"))
    assert_told(result, errors.USAGE, "s.npz: dimension batch is 2 in a and 3 in b", path)


def test_a_rewritten_model_without_its_data(gated_mlps: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    options = ["--precision", "fp8", "--stop-after", "rewrite", "--target", "rtx-blackwell"]
    assert CliRunner().invoke(app, [str(gated_mlps), "-o", str(folder / "o.engine"), *options]).exit_code == 0
    (folder / "o.rewritten.onnx.data").unlink()
    result = build(folder / "o.rewritten.onnx", "--plan", str(folder / "o.plan.yaml"))
    assert_told(result, errors.MODEL_AT_FAULT, "is missing; it belongs beside the model", folder / "o.rewritten.onnx")


def test_no_compiler_before_anything_is_quantized(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(tmp_path / "no-nvcc"))
    assert_told(build(gated_mlps), errors.UNAVAILABLE, "no-nvcc", gated_mlps)


def test_no_cache_before_anything_is_quantized(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "file"))
    assert_told(build(gated_mlps), errors.UNAVAILABLE, "set TRT_NVFP4_CACHE", gated_mlps)


def test_nothing_to_replace_before_shapes_are_asked_for(tmp_path: Path) -> None:
    """A convolution whose height nobody gave."""
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, "height", "width"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [weight],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    assert_told(build(path), errors.MODEL_AT_FAULT, "1 convolutions stay as they are: no Conv is replaced", path)
