"""The runner of engines over stand-ins for TensorRT and CUDA that compute in ONNX Runtime; and that the real bindings
have every name that it uses."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated_ids import generated

from onnx_models.fake_gpu import TRT, FakeEngine, FakeRuntime
from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.cuda import runtime as cuda
from trt_nvfp4.builder.cuda.runtime import Cuda
from trt_nvfp4.builder.errors import BuilderError, BuildFailedError, ModelFaultError, UnavailableError
from trt_nvfp4.builder.generate import tensorrt_runner
from trt_nvfp4.builder.generate.tensorrt_runner import TensorRTRunner


def _runner(
    tiny: TinyDecoder, path: Path, runtime: FakeRuntime, profiles: list[tuple[int, int]] | None = None, **changed: Any
) -> TensorRTRunner:
    engine = FakeEngine(tiny.save(path / "model.onnx"), runtime, profiles or [(1, 16), (1, 1)], batch=4)
    return TensorRTRunner(engine, TRT, replace(tiny.decoder, **changed), "model.engine", Cuda(runtime))


def test_tokens_are_those_without_a_cache_and_decode_is_one_graph(
    tiny: TinyDecoder, ragged: list[list[int]], tmp_path: Path
) -> None:
    runtime = FakeRuntime()
    runner = _runner(tiny, tmp_path, runtime)
    assert generated(runner, ragged, 10) == [tiny.greedy(prompt, 10) for prompt in ragged]
    assert (runtime.launches, runtime.graphs) == (8, 1)  # of 9 steps after the prompt the first is not a graph
    assert generated(runner, ragged[::-1], 10) == [tiny.greedy(prompt, 10) for prompt in ragged[::-1]]
    assert runtime.launches == 18  # the same batch again: the same graph, and one of the prompt, over emptied caches
    assert generated(runner, ragged[:1], 10) == [tiny.greedy(ragged[0], 10)]
    runner.close()
    assert (runtime.graphs, runtime.blocks) == (0, {})


def test_one_rank_of_several(tiny: TinyDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each context gets NCCL's communicator; a TensorRT that takes none is told."""
    capsule = object()
    given: list[object] = []
    runner = _runner(tiny, tmp_path, FakeRuntime())
    runner._communicator = capsule
    with pytest.raises(UnavailableError, match="no collectives between GPUs; use TensorRT 11"):
        generated(runner, [[1, 2]], 2)
    context = type(runner._engine.create_execution_context())

    def take(_: Any, communicator: object) -> bool:
        given.append(communicator)
        return len(given) < 3

    monkeypatch.setattr(context, "set_communicator", take, raising=False)
    runner = _runner(tiny, tmp_path, FakeRuntime())
    runner._communicator = capsule
    assert generated(runner, [[1, 2]], 3) == [tiny.greedy([1, 2], 3)]
    assert given == [capsule] * 2  # of prefill and of decode
    runner = _runner(tiny, tmp_path, FakeRuntime())
    runner._communicator = capsule
    with pytest.raises(BuilderError, match="did not take NCCL's communicator"):
        generated(runner, [[1, 2]], 2)


def test_prompts_longer_than_the_prefill_profile_are_taken_in_pieces(
    tiny: TinyDecoder, ragged: list[list[int]], tmp_path: Path
) -> None:
    runner = _runner(tiny, tmp_path, FakeRuntime(), [(1, 1), (2, 4)])
    assert generated(runner, ragged, 6) == [tiny.greedy(prompt, 6) for prompt in ragged]


def test_an_engine_that_cannot_be_recorded_runs_step_by_step(
    tiny: TinyDecoder, ragged: list[list[int]], tmp_path: Path
) -> None:
    runtime = FakeRuntime(records=False)
    assert generated(_runner(tiny, tmp_path, runtime), ragged, 6) == [tiny.greedy(prompt, 6) for prompt in ragged]
    assert runtime.launches == 0


def test_too_little_memory_names_the_way_out(tiny: TinyDecoder, tmp_path: Path) -> None:
    runner = _runner(tiny, tmp_path, FakeRuntime(memory=12_000))
    with pytest.raises(BuildFailedError, match="fewer prompts at once"):
        generated(runner, [[1]] * 4, 2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cache_dtype": "float16"}, "past_key_values.0.key is FLOAT, expected HALF"),
        ({"capacity": 30}, r"\[-1, 2, 24, 8\], expected \[-1, 2, 30, 8\]"),
        ({"kv_heads": [2] * 2, "head_dim": [8] * 2, "value_head_dim": [8] * 2}, "past_key_values.1.key is missing"),
    ],
)
def test_an_engine_that_is_not_what_its_metadata_says_is_refused(
    tiny: TinyDecoder, tmp_path: Path, changed: Any, words: str
) -> None:
    with pytest.raises(ModelFaultError, match=words):
        _runner(tiny, tmp_path, FakeRuntime(), **changed)


def test_the_batch_is_that_of_the_profiles(tiny: TinyDecoder, tmp_path: Path) -> None:
    assert _runner(tiny, tmp_path, FakeRuntime(), max_batch=9).decoder.max_batch == 4


def test_an_engine_without_a_cache_is_refused(tiny: TinyDecoder, gated_mlps: Path) -> None:
    engine = FakeEngine(gated_mlps, FakeRuntime(), [(1, 1)], batch=1)
    with pytest.raises(ModelFaultError, match="this engine has no cache; build one from a Hugging Face"):
        TensorRTRunner(engine, TRT, tiny.decoder, "model.engine", Cuda(FakeRuntime()))


def test_an_engine_without_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.engine").write_bytes(b"engine")
    with pytest.raises(BuilderError, match="keep the files together"):
        tensorrt_runner.decoder_beside(tmp_path / "a.engine")


def test_the_real_bindings_have_what_is_called() -> None:
    from cuda.bindings import runtime

    called = {node.value for node in _constants(cuda) if node.value.startswith("cuda") and node.value.isalnum()}
    kinds = {name for name in called if name.startswith(("cudaMemcpyHost", "cudaMemcpyDevice"))}
    assert len(called - kinds) > 12
    assert [name for name in called - kinds if not hasattr(runtime, name)] == []
    assert [name for name in kinds if not hasattr(runtime.cudaMemcpyKind, name)] == []
    assert hasattr(runtime.cudaStreamCaptureMode, "cudaStreamCaptureModeRelaxed")
    assert hasattr(runtime.cudaError_t, "cudaErrorMemoryAllocation")


def test_tensorrt_rtx_has_what_is_called() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    used: dict[str, set[str]] = {"engine": set(), "_engine": set(), "context": set()}
    for node in ast.walk(ast.parse(inspect.getsource(tensorrt_runner))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in used:
                used[name].add(node.attr)
    engine = (used["engine"] | used["_engine"]) - {"parent", "with_suffix"}  # those of a path
    assert len(engine) >= 8
    assert [name for name in engine if not hasattr(trt.ICudaEngine, name)] == []
    assert used["context"] >= {"execute_async_v3", "set_input_shape"}
    assert [name for name in used["context"] if not hasattr(trt.IExecutionContext, name)] == []


def _constants(module: Any) -> list[ast.Constant]:
    tree = ast.parse(inspect.getsource(module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
