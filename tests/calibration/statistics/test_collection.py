"""Statistics beyond amax against the same from the tensors themselves; interruption and resumption; memory's budget."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.calibration.statistics import collection
from trt_nvfp4.calibration.statistics import store as statistics_file
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.common.errors import CalibrationError

# Of rows of any rank; head_amax is of caches alone.
KINDS = tuple(kind for kind in collection.KINDS if kind != "head_amax")

K, HIDDEN = 32, 48
Sample = dict[str, np.ndarray]


def model(folder: Path, seed: int, opset: int = 18) -> Path:
    """h = tanh(x up), y = h down."""
    generator = np.random.default_rng(seed)
    weights = {
        "up": generator.standard_normal((K, HIDDEN)).astype(np.float32) / 4,
        "down": generator.standard_normal((HIDDEN, K)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["a"]),
        helper.make_node("Tanh", ["a"], ["h"]),
        helper.make_node("MatMul", ["h", "down"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "n", K]) for name in "xy")
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "mlp", [x], [y], initializers)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def samples(seed: int, count: int = 4) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [{"x": generator.standard_normal((2, 3 + i, K)).astype(np.float32) * (i + 1)} for i in range(count)]


def expected(path: Path, data: list[Sample]) -> dict[str, InputStatistics]:
    up = torch.from_numpy(numpy_helper.to_array(onnx.load(path).graph.initializer[0]).copy())
    x = torch.cat([torch.from_numpy(sample["x"]).reshape(-1, K) for sample in data])
    return {name: InputStatistics.of_rows(rows, KINDS) for name, rows in (("x", x), ("h", (x @ up).tanh()))}


def assert_same(found: Statistics, reference: dict[str, InputStatistics], kinds: set[str]) -> None:
    for name, statistics in reference.items():
        for kind in kinds:
            a, b = torch.as_tensor(getattr(found.of(name), kind)), torch.as_tensor(getattr(statistics, kind))
            assert a.shape == b.shape
            # Where a value lies on an edge between two FP4 values, it may fall to either side.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=(2e-3 if "quantized" in kind else 1e-5) * b.abs().max())


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_every_kind(opset: int, tmp_path: Path, seed: int) -> None:
    path, data = model(tmp_path, seed, opset), samples(seed)
    found = collect(path, {"x": set(KINDS), "h": set(KINDS)}, data)
    assert_same(found, expected(path, data), set(KINDS))
    assert found.rows == dict.fromkeys("xh", 2 * (3 + 4 + 5 + 6))
    only = collect(path, {"h": {"block_gram"}}, data)
    assert only.of("h").hessian is None
    assert only.of("x").amax is None


def test_a_tight_budget_takes_more_passes_and_gives_the_same(tmp_path: Path, seed: int) -> None:
    path, data = model(tmp_path, seed), samples(seed)
    events: list[tuple[int, int]] = []
    kinds = {"x": {"hessian"}, "h": {"hessian"}}
    tight = collect(path, kinds, data, lambda done, total: events.append((done, total)), budget_bytes=1)
    assert events == [(i + 1, 3 * len(data)) for i in range(3 * len(data))]
    assert_same(tight, expected(path, data), {"hessian"})
    events.clear()
    collect(path, kinds, data, lambda done, total: events.append((done, total)))
    assert events[-1] == (2 * len(data), 2 * len(data))
    events.clear()
    budget = 4 * (K**2 + HIDDEN**2)  # of both
    collect(path, kinds, data, lambda done, total: events.append((done, total)), budget_bytes=budget)
    assert events[-1] == (2 * len(data), 2 * len(data))


class InterruptedRunError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 3, 5, 7, 10])
def test_an_interrupted_run_goes_on(stop: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the first pass, or in one over Hessians: what was done is not computed again, and all agrees."""
    monkeypatch.setattr(collection, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(collection, "_SAVE_SHARE", 0)
    path, data, state = model(tmp_path, seed), samples(seed), tmp_path / "s.statistics.json"
    kinds = {"x": set(KINDS), "h": {"hessian"}}

    def interrupt(done: int, total: int) -> None:
        if done == stop:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        collect(path, kinds, data, interrupt, resume=state, budget_bytes=4 * HIDDEN**2)
    if stop > 1:
        assert not state.exists()
        with pytest.raises(CalibrationError, match="its run was interrupted"):
            Statistics.load(statistics_file.state(state))
    done: list[int] = []
    found = collect(path, kinds, data, lambda n, _: done.append(n), resume=state, budget_bytes=4 * HIDDEN**2)
    assert done[0] == stop  # reported before it was saved
    reference = expected(path, data)
    assert_same(found, {"x": reference["x"]}, set(KINDS))
    assert_same(found, {"h": reference["h"]}, {"hessian"})
    found.save(state)
    assert_same(Statistics.load(state), {"x": reference["x"]}, set(KINDS))
    assert len(list((tmp_path / "s.statistics").iterdir())) == len(KINDS)  # x: all but amax; h: one
    assert not statistics_file.state(state).exists()


def test_other_samples_do_not_go_on(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(collection, "_SAVE_SHARE", 0)
    path, state = model(tmp_path, seed), tmp_path / "s.statistics.json"

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        collect(path, ["h"], samples(seed), interrupt, resume=state)
    for other in (samples(seed + 1), samples(seed)[:1]):  # the second: fewer than it had done
        with pytest.raises(CalibrationError, match=r"s\.statistics\.partial.*saw other samples; delete it"):
            collect(path, ["h"], other, resume=state)
    # Other tensors: a new run, which replaces the state.
    found = collect(path, {"x": {"mean_square"}}, samples(seed + 1), resume=state)
    assert_same(found, {"x": expected(path, samples(seed + 1))["x"]}, {"mean_square", "amax"})


@pytest.mark.parametrize("stop", [5, 7])
def test_other_samples_do_not_go_on_in_a_later_pass(
    stop: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed for them, and the state stays good for those that it saw."""
    if stop == 7:  # or else saved at the end of the first pass alone
        monkeypatch.setattr(collection, "_SAVE_SECONDS", 0)
        monkeypatch.setattr(collection, "_SAVE_SHARE", 0)
    path, data, state = model(tmp_path, seed), samples(seed), tmp_path / "s.statistics.json"

    def interrupt(done: int, total: int) -> None:
        if done == stop:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        collect(path, {"h": {"hessian"}}, data, interrupt, resume=state)
    done: list[int] = []
    for other in (samples(seed + 1), data[:-1], [*data, data[0]]):
        with pytest.raises(CalibrationError, match=r"s\.statistics\.partial.*saw other samples; delete it"):
            collect(path, {"h": {"hessian"}}, other, lambda n, _: done.append(n), resume=state)
    assert not done
    found = collect(path, {"h": {"hessian"}}, data, lambda n, _: done.append(n), resume=state)
    assert done[0] == stop
    assert_same(found, {"h": expected(path, data)["h"]}, {"hessian"})
    # Not saved yet: other samples do not get what these gave.
    with pytest.raises(CalibrationError, match="saw other samples"):
        collect(path, {"h": {"hessian"}}, samples(seed + 1), resume=state)
    statistics_file.state(state).unlink()
    found = collect(path, {"h": {"hessian"}}, samples(seed + 1), resume=state)
    assert_same(found, {"h": expected(path, samples(seed + 1))["h"]}, {"hessian"})


class Changing:
    """Other samples each time, as of a loader without a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Sample]:
        self.seed += 1
        return iter(samples(self.seed))


@pytest.mark.parametrize("kinds", [{"hessian"}, {"hessian", "mean_square"}])
def test_finished_statistics_survive_a_run_that_fails(
    kinds: set[str], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(collection, "_SAVE_SHARE", 0)
    path, data, file = model(tmp_path, seed), samples(seed), tmp_path / "s.statistics.json"
    collect(path, {"h": kinds}, data, resume=file).save(file)
    before = {left.relative_to(tmp_path) for left in tmp_path.rglob("*")}
    with pytest.raises(CalibrationError, match=r"^the calibration samples changed between passes.*has to seed"):
        collect(path, {"h": {"hessian"}}, Changing(seed), resume=file)
    assert {left.relative_to(tmp_path) for left in tmp_path.rglob("*")} == before
    assert_same(Statistics.load(file, path), {"h": expected(path, data)["h"]}, kinds)

    def interrupt(done: int, total: int) -> None:
        if done == 6:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        collect(path, {"h": {"hessian"}}, data, interrupt, resume=file)
    assert_same(Statistics.load(file, path), {"h": expected(path, data)["h"]}, kinds)
    collect(path, {"h": kinds}, data, resume=file).save(file)
    assert len(list(tmp_path.rglob("*"))) == len(before)
    assert_same(Statistics.load(file, path), {"h": expected(path, data)["h"]}, kinds)


def test_other_weights_beside_the_model_begin_anew(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own file is the same then."""
    monkeypatch.setattr(collection, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(collection, "_SAVE_SHARE", 0)
    state, path = tmp_path / "s.statistics.json", tmp_path / "model.onnx"

    def with_weights(seed: int) -> Path:
        proto = onnx.load(model(tmp_path, seed))
        path.unlink()
        onnx.save(proto, path, save_as_external_data=True, location="model.data", size_threshold=0)
        return path

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        collect(with_weights(seed), {"h": {"mean_square"}}, samples(seed), interrupt, resume=state)
    file = path.read_bytes()
    (tmp_path / "model.data").unlink()
    assert with_weights(seed + 1).read_bytes() == file
    found = collect(path, {"h": {"mean_square"}}, samples(seed), resume=state)
    fresh = collect(path, {"h": {"mean_square"}}, samples(seed))
    torch.testing.assert_close(found.of("h").mean_square, fresh.of("h").mean_square)


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_a_tensor_without_rows_in_some_samples(opset: int, tmp_path: Path, seed: int) -> None:
    """The rows that are sent to an expert: none of a short sample, perhaps none at all."""
    graph = helper.make_graph(
        [
            helper.make_node("NonZero", ["sent"], ["index"]),
            helper.make_node("Squeeze", ["index", "first"], ["rows"]),
            helper.make_node("Gather", ["x", "rows"], ["e"]),
        ],
        "dispatch",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", K]),
            helper.make_tensor_value_info("sent", TensorProto.BOOL, ["n"]),
        ],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, ["m", K])],
        [numpy_helper.from_array(np.array([0]), "first")],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    x = np.random.default_rng(seed).standard_normal((3, 4, K)).astype(np.float32)
    sent = np.array([[False] * 4, [True, False, True, True], [False] * 4])
    data: list[Sample] = [{"x": rows, "sent": mask} for rows, mask in zip(x, sent, strict=True)]
    reference = InputStatistics.of_rows(torch.from_numpy(x[1][sent[1]]), KINDS)
    assert_same(collect(path, {"e": set(KINDS)}, data), {"e": reference}, set(KINDS))
    never = collect(path, {"e": set(KINDS)}, data[:1]).of("e")
    assert never.amax == 0
    assert all(not never[kind].any() for kind in KINDS if kind != "amax")


@pytest.mark.parametrize("flag", [True, False])
def test_a_tensor_that_a_branch_alone_reads(flag: bool, tmp_path: Path, seed: int) -> None:
    """What makes it is not taken out of the graph."""
    path = tmp_path / "model.onnx"
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[n, {K}] x, bool flag) => (float[n, {K}] z) {{
        d = Add(x, x)
        y = If(flag) <then_branch = t () => (float[n, {K}] a) {{ a = Neg(d) }},
                      else_branch = e () => (float[n, {K}] b) {{ b = Identity(x) }}>
        z = Tanh(y)
    }}"""
    onnx.save(onnx.parser.parse_model(text), path)
    x = np.random.default_rng(seed).standard_normal((4, K)).astype(np.float32)
    found = collect(path, ["y"], [{"x": x, "flag": np.array(flag)}])
    assert found.amax["y"] == np.abs(x).max() * (2 if flag else 1)


@pytest.mark.parametrize("kind", ["mean_square", "block_gram", "hessian", "quantized_hessian", "quantized_cross"])
def test_squares_beyond_float32_are_named(kind: str, tmp_path: Path, seed: int) -> None:
    large = [{"x": sample["x"] * np.float32(1e20)} for sample in samples(seed)]
    with pytest.raises(CalibrationError, match=rf"take tensor x to [\d.]+e\+2\d, and its {kind} beyond float32: .*mse"):
        collect(model(tmp_path, seed), {"x": {kind}}, large)


def test_what_cannot_be_collected(tmp_path: Path, seed: int) -> None:
    path = model(tmp_path, seed)

    def stream() -> Iterator[Sample]:
        yield from samples(seed)

    with pytest.raises(CalibrationError, match="samples that can be read again"):
        collect(path, {"h": {"hessian"}}, stream())
    with pytest.raises(CalibrationError, match="unknown statistic 'median' of tensor h"):
        collect(path, {"h": {"median"}}, samples(seed))
    with pytest.raises(CalibrationError, match="no calibration sample"):
        collect(path, {"h": {"hessian"}}, [])

    with pytest.raises(CalibrationError, match="samples changed between passes"):
        collect(path, {"h": {"hessian"}}, Changing(seed))


def test_arrays_are_mapped_from_disk(tmp_path: Path, seed: int) -> None:
    path, data = model(tmp_path, seed), samples(seed)
    found = collect(path, {"h": {"hessian"}}, data)
    found.save(tmp_path / "s.statistics.json")
    loaded = Statistics.load(tmp_path / "s.statistics.json")
    assert loaded.of("h").rows == found.of("h").rows
    assert isinstance(loaded.arrays["h"]["hessian"], np.memmap)
    torch.testing.assert_close(loaded.of("h").hessian, found.of("h").hessian)
    (file,) = (tmp_path / "s.statistics").iterdir()
    file.unlink()
    with pytest.raises(CalibrationError, match="not a file of activation statistics"):
        Statistics.load(tmp_path / "s.statistics.json")
