"""Parts on a GPU, over stand-ins for TensorRT and CUDA that compute in ONNX Runtime: what flows keeps its address."""

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnx_models.fake_gpu import TRT, FakeContext, FakeEngine, FakeRuntime
from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.components.chain import put_all, run_chain
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.devices import tensorrt_device
from trt_nvfp4.builder.components.devices.onnx_device import OnnxDevice
from trt_nvfp4.builder.components.devices.tensorrt_device import TensorRTDevice
from trt_nvfp4.builder.components.manifest import Flow, Loop, Manifest
from trt_nvfp4.builder.components.parts import described
from trt_nvfp4.builder.cuda.runtime import Cuda
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.generate.loop import generate_ids
from trt_nvfp4.builder.generate.sampling import Sampling

FIRST = """<ir_version: 10, opset_import: ["": 21]>
first (float[n, 4] x) => (float[n, 4] y, float[n, 4] unused) {
    y = Add(x, x)
    unused = Neg(x)
}"""
STEP = """<ir_version: 10, opset_import: ["": 21]>
step (float[n, 4] y, float[n, 4] state, float[1] time) => (float[n, 4] next) {
    a = Mul(state, time)
    next = Add(a, y)
}"""


class PartEngine(FakeEngine):
    """Of any model; every input's first dimension goes up to `largest`."""

    largest = 3

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        shape = self.get_tensor_shape(name)
        fewest, most = self.profiles[profile]
        token_axis = 1 if name == "input_ids" else None
        low = [1 if d < 0 else d for d in shape]
        high = [self.largest if d < 0 else d for d in shape]
        if token_axis is not None:
            low[token_axis], high[token_axis] = fewest, most
        return [tuple(low), tuple(high), tuple(high)]

    def create_execution_context(self) -> "PartContext":
        return PartContext(self)


class PartContext(FakeContext):
    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        feeds = {
            name: np.zeros(self.shapes[name], np.int64 if type_.elem_type == onnx.TensorProto.INT64 else np.float32)
            for name, type_ in self.engine.inputs.items()
        }
        if "new_length" in feeds:
            feeds["new_length"] += 1
        found: np.ndarray = self.engine.session.run([name], feeds)[0]
        return found.shape


def save(text: str, path: Path) -> Path:
    onnx.save(parser.parse_model(text), path)
    return path


@pytest.fixture
def chain(tmp_path: Path) -> Manifest:
    parts = [
        described("first", save(FIRST, tmp_path / "first.onnx")),
        described(
            "step", save(STEP, tmp_path / "step.onnx"), Loop(4, {"next": "state"}, {"time": [1.0, 0.5, 2.0, 3.0]})
        ),
    ]
    return Manifest("run", parts, [Flow("first.y", "step.y")]).check()


def device_of(
    folder: Path, manifest: Manifest, runtime: FakeRuntime, profiles: list[tuple[int, int]]
) -> TensorRTDevice:
    engines = {part.name: PartEngine(folder / f"{part.name}.onnx", runtime, profiles, 3) for part in manifest.parts}
    return TensorRTDevice("gpu", engines, TRT, manifest, Cuda(runtime))


def test_a_chain_with_a_loop_runs_where_its_buffers_are(
    chain: Manifest, tmp_path: Path, rng: np.random.Generator
) -> None:
    runtime = FakeRuntime()
    device = device_of(tmp_path, chain, runtime, [(1, 1)])
    blocks = 0
    for run in range(5):
        x, state = (rng.standard_normal((2, 4)).astype(np.float32) for _ in range(2))
        values = run_chain(device, chain, put_all(device, chain, {"x": x, "state": state}))
        expected = state
        for time in (1.0, 0.5, 2.0, 3.0):
            expected = expected * np.float32(time) + 2 * x
        np.testing.assert_allclose(device.get(values["step.next"]), expected, rtol=1e-5)
        blocks = blocks or len(runtime.blocks)
        assert len(runtime.blocks) == blocks  # what was bound stays
        if run == 2:
            launched = runtime.launches
            assert runtime.graphs == 4  # one of the first part; of the loop, from the input and from either buffer
    assert runtime.launches - launched == 2 * (1 + 4)  # everything is recorded by then
    one = run_chain(device, chain, put_all(device, chain, {"x": x[:1], "state": state[:1]}))
    np.testing.assert_allclose(device.get(one["step.next"]), expected[:1], rtol=1e-5)
    with pytest.raises(UsageError, match=r"no profile of the engine first takes x \[5, 4\]"):
        run_chain(device, chain, put_all(device, chain, {"x": np.zeros((5, 4), np.float32)}))
    device.close()


def test_an_engine_that_is_not_the_part(chain: Manifest, tmp_path: Path) -> None:
    save(STEP.replace("float[n, 4]", "float[n, 5]"), tmp_path / "step.onnx")
    with pytest.raises(ModelFaultError, match=r"step: y is float32 \[\?, 5\], expected float32 \[n, 4\]"):
        device_of(tmp_path, chain, FakeRuntime(), [(1, 1)])
    save(STEP.replace("next", "other"), tmp_path / "step.onnx")
    with pytest.raises(BuilderError, match="step: next is missing among the engine's tensors"):
        device_of(tmp_path, chain, FakeRuntime(), [(1, 1)])


def test_a_decoder_makes_the_tokens_that_it_makes_on_the_cpu(tmp_path: Path, rng: np.random.Generator) -> None:
    """Caches are updated in place, which the stand-in asserts; steps of one token are recorded."""
    tiny = TinyDecoder(rng)
    tiny.save(tmp_path / "decoder.onnx")
    manifest = Manifest("generate", [described("decoder", tmp_path / "decoder.onnx")]).check()
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    runtime = FakeRuntime()
    found = []
    for device in (OnnxDevice(tmp_path, manifest), device_of(tmp_path, manifest, runtime, [(2, 16), (1, 1)])):
        runner = PartsRunner(device, manifest, tiny.decoder)
        steps = generate_ids(runner, prompts, 8, Sampling())
        found.append([[token.id for token in tokens] for tokens in steps])
    assert found[0] == found[1]
    assert len(found[0]) == 8
    assert (runtime.graphs, runtime.launches) == (1, 6)


def test_the_real_bindings_have_what_is_called() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    used: dict[str, set[str]] = {"engine": set(), "context": set()}
    for node in ast.walk(ast.parse(inspect.getsource(tensorrt_device))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in used:
            used[node.value.id].add(node.attr)
    for kind, owner in (("engine", trt.ICudaEngine), ("context", trt.IExecutionContext)):
        assert len(used[kind]) >= 4
        assert [name for name in used[kind] if not hasattr(owner, name)] == []


def test_bfloat16_goes_and_comes_as_float32(rng: np.random.Generator, chain: Manifest, tmp_path: Path) -> None:
    device: Any = device_of(tmp_path, chain, FakeRuntime(), [(1, 1)])
    from trt_nvfp4.builder.components.manifest import Port

    array = np.float32([1.0, -2.5, 1 + 2**-9])
    held = device.put("x", array, Port("bfloat16", (3,)))
    np.testing.assert_array_equal(device.get(held), np.float32([1.0, -2.5, 1.0]))
    assert device.get(held).dtype == np.float32
