"""`--strip`: engines without their plugins' weights, and the one file that they share."""

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import invoked
from safetensors import safe_open

from onnx_models.fake_gpu import FakeEngine, FakeRuntime
from onnx_models.small_decoders import saved
from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, inspect_engine
from trt_nvfp4.builder.cuda.runtime import Cuda
from trt_nvfp4.builder.errors import USAGE, BuilderError, ModelFaultError
from trt_nvfp4.builder.generate.open import open_runner
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import weights_file
from trt_nvfp4.builder.tensorrt.bound_weights import with_weights
from trt_nvfp4.builder.tensorrt.bundle import NETWORK
from trt_nvfp4.builder.tensorrt.runtime_cache import EngineWithCache
from trt_nvfp4.builder.tensorrt.strip import SMALLEST, strip
from trt_nvfp4.builder.tensorrt.verify import Layer, copied_weights
from trt_nvfp4.builder.tensorrt.weights_file import ENGINE_NAME, read_header


def request(model: Path, **options: Any) -> pipeline.Request:
    return pipeline.Request(model=model, target=find_target("rtx-blackwell"), strip=True, **options)


def test_a_bundle_computes_the_same_and_holds_the_weights_once(tmp_path: Path, gated_mlps: Path) -> None:
    plain = tmp_path / "plain"
    pipeline.run(pipeline.Request(model=gated_mlps, target=find_target("rtx-blackwell"), bundle=plain))
    pipeline.run(request(gated_mlps, bundle=tmp_path / "stripped"))
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float16)
    results = [session(folder / "model.onnx").run(None, {"x": x})[0] for folder in (plain, tmp_path / "stripped")]
    np.testing.assert_array_equal(*results)
    # The network has the weights as inputs of the same names, types and shapes; their bytes are those of the model.
    manifest = json.loads((tmp_path / "stripped" / MANIFEST).read_text())
    network = onnx.load(tmp_path / "stripped" / NETWORK)
    model = onnx.load(plain / "model.onnx")
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert all(onnx.numpy_helper.to_array(tensor).nbytes < SMALLEST for tensor in network.graph.initializer)
    stripped = [value.name for value in network.graph.input if value.name != "x"]
    assert sorted(stripped) == sorted(manifest["weights"]["inputs"])
    with safe_open(tmp_path / "stripped" / manifest["weights"]["file"], framework="np") as opened:
        for name in stripped:
            np.testing.assert_array_equal(opened.get_tensor(name), weights[name])
    assert not any((tmp_path / "stripped" / "model.onnx.data").read_bytes())


def test_a_weight_that_something_else_reads_stays(tmp_path: Path, gated_mlps: Path) -> None:
    pipeline.run(request(gated_mlps, output=tmp_path / "o.engine", stop_after="rewrite"))
    model = onnx.load(tmp_path / "o.rewritten.onnx")
    shared = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data)).name
    model.graph.output.append(onnx.helper.make_tensor_value_info("seen", onnx.TensorProto.INT8, None))
    model.graph.node.append(onnx.helper.make_node("Identity", [shared], ["seen"]))
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    found = strip(tmp_path / "m.onnx", tmp_path / "out" / "model.onnx", tmp_path / "out" / NETWORK)
    assert found is not None
    assert shared not in {tensor.name for tensor in found.tensors}
    assert shared in {tensor.name for tensor in onnx.load(tmp_path / "out" / NETWORK).graph.initializer}


def test_a_model_without_plugins_is_not_stripped(tmp_path: Path, gated_mlps: Path) -> None:
    report = pipeline.run(request(gated_mlps, bundle=tmp_path / "b", precision="bf16"))
    assert any("no plugin has weights" in warning for warning in report.warnings)
    assert json.loads((tmp_path / "b" / MANIFEST).read_text())["weights"] is None


def test_a_stripped_decoder_runs_in_torch(tmp_path: Path) -> None:
    """Where there is no TensorRT: the bundle, and the rewritten model beside it, with the weights of the one file."""
    pytest.importorskip("transformers")
    saved("llama", tmp_path / "hf", 0)
    options: dict[str, Any] = {"cache_capacity": 16, "recipe": "max"}
    plain = pipeline.Request(tmp_path / "hf", find_target("rtx-blackwell"), bundle=tmp_path / "plain", **options)
    pipeline.run(plain)
    stripped = tmp_path / "stripped"
    pipeline.run(request(tmp_path / "hf", bundle=stripped, **options))
    assert json.loads((stripped / MANIFEST).read_text())["weights"]["inputs"]
    found = []
    for path in (tmp_path / "plain", stripped, stripped / "model.onnx", tmp_path / "stripped.rewritten.onnx"):
        runner = open_runner(path, runner="torch")
        runner.start(1)
        logits = runner.step(np.array([[3, 1, 4]]), np.zeros(1, np.int64), np.full(1, 3))
        found.append(logits.host())
        runner.close()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    with pytest.raises(BuilderError, match=r"give model\.onnx beside it, or the bundle"):
        open_runner(stripped / NETWORK, runner="torch")


def test_the_network_without_weights_is_no_model(tmp_path: Path, gated_mlps: Path) -> None:
    """Every command refuses it with one message."""
    pipeline.run(request(gated_mlps, bundle=tmp_path / "b"))
    network, model = str(tmp_path / "b" / NETWORK), str(gated_mlps)
    target = ["--target", "rtx-blackwell"]
    for app, arguments in (
        (
            build_engine.app,
            [network, "--plan", str(tmp_path / "b.plan.yaml"), "-o", str(tmp_path / "o.engine"), *target],
        ),
        (compare_engine.app, [model, network]),
        (bench_engine.app, [network, *target]),
        (inspect_engine.app, [network]),
    ):
        shown = invoked(app, arguments, USAGE, f"{network}: is what TensorRT builds a --strip engine from")
        assert shown.stderr.count("error:") == 1


@pytest.mark.slow
def test_engines_share_one_file(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> None:
    """A prefill and a decode engine of one rewritten model, the second from a bundle, and one of other weights."""
    pytest.importorskip("tensorrt_rtx")
    model = save_gated_mlps(tmp_path / "m.onnx", hidden=256, intermediate=512)
    out = tmp_path / "out"
    prefill = pipeline.run(request(model, output=out / "prefill.engine", embed_plugins=False))
    assert prefill.plugin_weights is not None
    again = request(
        out / "prefill.rewritten.onnx",
        plan=out / "prefill.plan.yaml",
        bundle=tmp_path / "decode",
        embed_plugins=False,
        max_shapes={"x": (1, 256)},
        opt_shapes={"x": (1, 256)},
    )
    pipeline.run(again)
    command = [sys.executable, tmp_path / "decode" / "build_engine.py", "-o", out / "decode.engine"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("weights-*.safetensors")
    assert file.name == prefill.plugin_weights["file"]
    assert json.loads((out / "decode.report.json").read_text())["weights"]["digest"] == read_header(file).digest
    for engine in (out / "prefill.engine", out / "decode.engine"):
        content = engine.read_bytes()
        assert (ENGINE_NAME + read_header(file).digest).encode() in content
        header = read_header(file)
        packed = [tensor for tensor in header.tensors if tensor.dtype == "I8"]  # biases are zeros, which are anywhere
        assert packed
        for tensor in packed:
            assert next(header.chunks(tensor))[:SMALLEST] not in content


LAYER = Layer("a", "custom_layer", (), frozenset(), tensors=frozenset({"w", "x"}))


def test_weights_that_tensorrt_copies_are_noticed() -> None:
    assert list(copied_weights([LAYER], ["w"])) == []
    (problem,) = copied_weights([LAYER], ["w", "v"])
    assert "1 of 2 stripped weights are copied" in problem
    assert "profile 1" in next(copied_weights([LAYER], ["w"], profiles=2))


class Stripped:
    """An engine of y = x W whose W is in a file, over stand-ins for TensorRT and CUDA."""

    def __init__(self, folder: Path, value: float = 2.0) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "a.engine"
        text = """<ir_version: 10, opset_import: ["": 21]>
            product (float[n, 4] x, float[4, 3] w) => (float[n, 3] y) { y = MatMul(x, w) }"""
        onnx.save(onnx.parser.parse_model(text), folder / "m.onnx")
        weight = np.full((4, 3), value, np.float32).tobytes()
        described = [weights_file.Tensor("w", "F32", (4, 3))]
        self.file = weights_file.write(folder, described, lambda _: [weight])

    def engine(self, runtime: FakeRuntime) -> FakeEngine:
        engine = FakeEngine(self.path.with_name("m.onnx"), runtime, [(1, 4)], batch=2)
        engine.name = ENGINE_NAME + self.file.digest
        return engine


def run(engine: Any, runtime: FakeRuntime) -> np.ndarray:
    cuda = Cuda(runtime)
    context = engine.create_execution_context()
    context.set_optimization_profile_async(0, 0)
    assert context.set_input_shape("x", (2, 4))
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
    context.set_tensor_address("x", cuda.device(x.nbytes))
    context.set_tensor_address("y", cuda.device(y.nbytes))
    cuda.to_device(context.addresses["x"], x)
    assert context.execute_async_v3(0)
    cuda.to_host(y, context.addresses["y"])
    cuda.close()
    return y


def test_engines_read_one_copy_in_gpu_memory(tmp_path: Path) -> None:
    runtime, stripped = FakeRuntime(), Stripped(tmp_path)
    first = with_weights(stripped.engine(runtime), stripped.path, Cuda(runtime))
    assert [first.get_tensor_name(index) for index in range(first.num_io_tensors)] == ["x", "y"]
    held = len(runtime.blocks)
    second = with_weights(stripped.engine(runtime), stripped.path, Cuda(runtime))
    assert len(runtime.blocks) == held == 1
    assert run(first, runtime).tolist() == run(second, runtime).tolist() == [[8.0] * 3] * 2
    # As long as an engine or a context refers to them.
    context = second.create_execution_context()
    del first, second
    gc.collect()
    assert len(runtime.blocks) == 1
    del context
    gc.collect()
    assert not runtime.blocks


def test_an_engine_with_all_its_weights_is_left_alone(tmp_path: Path) -> None:
    engine = Stripped(tmp_path).engine(FakeRuntime())
    engine.name = "Unnamed Network 0"
    assert with_weights(engine, tmp_path / "a.engine") is engine


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    ours, theirs = Stripped(tmp_path / "ours"), Stripped(tmp_path / "theirs", 3.0)
    runtime = FakeRuntime()
    shutil.copy(theirs.file.path, ours.file.path)
    with pytest.raises(ModelFaultError, match="holds the weights of another model"):
        with_weights(ours.engine(runtime), ours.path, Cuda(runtime))
    # Nor does their digest make them ours.
    content = theirs.file.path.read_bytes().replace(theirs.file.digest.encode(), ours.file.digest.encode())
    ours.file.path.write_bytes(content)
    with pytest.raises(BuilderError, match="its content is not what it was"):
        with_weights(ours.engine(runtime), ours.path, Cuda(runtime))
    ours.file.path.unlink()
    with pytest.raises(BuilderError, match="copy the two together"):
        with_weights(ours.engine(runtime), ours.path, Cuda(runtime))
    gc.collect()
    assert not runtime.blocks


def test_weights_that_are_none_of_the_engines_inputs(tmp_path: Path) -> None:
    stripped, runtime = Stripped(tmp_path), FakeRuntime()
    tensors = [weights_file.Tensor("w", "F32", (3, 4))]
    other = weights_file.write(tmp_path, tensors, lambda _: [bytes(48)])
    engine = stripped.engine(runtime)
    engine.name = ENGINE_NAME + other.digest
    with pytest.raises(BuilderError, match=r"its input w is F32 \[4, 3\], and .* has F32 \[3, 4\]"):
        with_weights(engine, stripped.path, Cuda(runtime))


class CachedEngine(FakeEngine):
    """Compiles its kernels where the runtime cache has none."""

    compiled = 0

    def create_runtime_config(self) -> SimpleNamespace:
        cache = SimpleNamespace(kernels=b"")
        cache.serialize = lambda: cache.kernels
        cache.deserialize = lambda blob: setattr(cache, "kernels", blob) is None
        return SimpleNamespace(cache=cache, create_runtime_cache=lambda: cache, set_runtime_cache=lambda _: True)

    def create_execution_context(self, config: Any = None) -> Any:
        if not config.cache.kernels:
            CachedEngine.compiled += 1
            config.cache.kernels = b"kernels"
        return super().create_execution_context()


def test_a_second_start_makes_neither_kernels_nor_weights_anew(tmp_path: Path) -> None:
    """As `load_engine` does: the runtime cache first, then the weights; files stay as they are."""
    stripped, kept = Stripped(tmp_path), []
    for _ in range(2):
        runtime = FakeRuntime()
        engine = CachedEngine(tmp_path / "m.onnx", runtime, [(1, 4)], batch=2)
        engine.name = ENGINE_NAME + stripped.file.digest
        whole = with_weights(EngineWithCache(engine, stripped.path), stripped.path, Cuda(runtime))
        assert run(whole, runtime).tolist() == [[8.0] * 3] * 2
        del engine, whole
        gc.collect()
        kept.append({file: file.stat().st_mtime_ns for file in tmp_path.iterdir()})
    assert CachedEngine.compiled == 1
    assert tmp_path / "a.engine.runtime_cache" in kept[0]
    assert kept[1] == kept[0]
