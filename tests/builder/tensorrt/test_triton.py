"""The model repository: Triton's own message of a model's configuration parses what is written."""

import importlib.metadata
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4 import build
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.tensorrt import triton

# The package around the messages needs gRPC, and with it an older protobuf.
CLIENT = importlib.metadata.distribution("tritonclient").locate_file("tritonclient")
model_config_pb2 = SimpleNamespace(**runpy.run_path(f"{CLIENT}/grpc/model_config_pb2.py"))


def parsed(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def model_of(**types: int) -> onnx.ModelProto:
    """A model that gives out its inputs."""
    shapes = {"scalar": [], "fixed": [2, 3]}
    given = [helper.make_tensor_value_info(n, kind, shapes.get(n, ["batch", 4])) for n, kind in types.items()]
    out = [helper.make_tensor_value_info(f'{n}"out', kind, shapes.get(n, ["batch", 4])) for n, kind in types.items()]
    nodes = [helper.make_node("Identity", [n], [f'{n}"out']) for n in types]
    return helper.make_model(helper.make_graph(nodes, "g", given, out))


def test_configuration_describes_every_tensor() -> None:
    model = model_of(scalar=TensorProto.INT64, fixed=TensorProto.BFLOAT16, free=TensorProto.UINT8)
    found = parsed(triton.config("m", model, {"scalar"}))
    assert (found.name, found.platform, found.max_batch_size) == ("m", "tensorrt_plan", 0)
    scalar, fixed, free = found.input
    assert scalar.is_shape_tensor
    assert list(scalar.dims) == [1]
    assert scalar.HasField("reshape")
    assert (list(fixed.dims), fixed.data_type) == ([2, 3], model_config_pb2.TYPE_BF16)
    assert (list(free.dims), free.data_type) == ([-1, 4], model_config_pb2.TYPE_UINT8)
    assert [value.name for value in found.output] == ['scalar"out', 'fixed"out', 'free"out']
    assert found.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU


def test_a_type_that_triton_does_not_have() -> None:
    with pytest.raises(ModelFaultError, match="input 'free' is float8e4m3fn"):
        triton.config("m", model_of(free=TensorProto.FLOAT8E4M3FN), set())


def test_repository_holds_engines_and_libraries(tmp_path: Path) -> None:
    engine, library = tmp_path / "a.engine", tmp_path / "libplugins.so"
    repository = tmp_path / "repository"
    for content in (b"first", b"second"):
        engine.write_bytes(content)
        library.write_bytes(content)
        triton.write(repository, "a", "name: 'a'", engine, [library])
        engine.unlink()  # as a new engine takes its place
    triton.write(repository, "b", "name: 'b'", None, [])
    assert (repository / "a" / "1" / "model.plan").read_bytes() == b"second"
    page = (repository / "README.md").read_text()
    assert f"plugins={repository / 'a' / 'libplugins.so'}" in page
    assert f"-o {repository / 'b' / '1' / 'model.plan'}" in page
    assert (repository / "b" / "1").is_dir()


def test_a_bundle_with_its_repository(tmp_path: Path, gated_mlps: Path) -> None:
    build(gated_mlps, target="rtx-blackwell", bundle=tmp_path / "mlp", triton=tmp_path / "repository")
    found = parsed((tmp_path / "repository" / "mlp" / "config.pbtxt").read_text())
    proto = onnx.load(tmp_path / "mlp" / "model.onnx", load_external_data=False)
    assert [value.name for value in found.input] == [value.name for value in proto.graph.input]


def test_engines_that_triton_does_not_run_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "mlp.onnx"
    model.touch()
    with pytest.raises(UsageError, match="Triton runs those of the package tensorrt"):
        build(model, target="rtx-blackwell", output=tmp_path / "a.engine", triton=tmp_path / "repository")
    with pytest.raises(UsageError, match="Triton needs a model name"):
        build(model, target="h200", bundle=tmp_path / 'a"b', triton=tmp_path / "repository")
    decoder = TinyDecoder(np.random.default_rng()).save(tmp_path / "decoder.onnx")
    with pytest.raises(UsageError, match="serve the engine"):
        build(decoder, target="h200", bundle=tmp_path / "b", triton=tmp_path / "repository")
