"""Activation statistics against the model computed in Torch."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.calibration.statistics import store as statistics_file
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.common.errors import CalibrationError

K, HIDDEN = 24, 40
ONNX_TYPE = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}


class Mlp:
    """down(silu(up(x))) + x as a model file, and in Torch."""

    def __init__(self, folder: Path, seed: int, dtype: torch.dtype, external: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.up = torch.randn(K, HIDDEN, generator=generator).to(dtype)
        self.down = torch.randn(HIDDEN, K, generator=generator).to(dtype)
        self.dtype = dtype
        self.path = folder / "model.onnx"
        nodes = [
            helper.make_node("MatMul", ["x", "up"], ["a"]),
            helper.make_node("Sigmoid", ["a"], ["s"]),
            helper.make_node("Mul", ["a", "s"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "down"], ["m"]),
            helper.make_node("Add", ["m", "x"], ["y"]),
        ]
        weights = []
        for name, tensor in (("up", self.up), ("down", self.down)):
            raw = tensor.view(torch.uint8).numpy().tobytes()
            weights.append(helper.make_tensor(name, ONNX_TYPE[dtype], tensor.shape, raw, raw=True))
        x, y = (helper.make_tensor_value_info(n, ONNX_TYPE[dtype], ["n", K]) for n in "xy")
        graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, self.path, save_as_external_data=external, location="weights.bin", size_threshold=0)

    def tensors(self, x: np.ndarray) -> dict[str, torch.Tensor]:
        wide = torch.from_numpy(x).float()
        a = wide @ self.up.float()
        hidden = torch.nn.functional.silu(a)
        return {"x": wide, "a": a, "hidden": hidden, "y": hidden @ self.down.float() + wide}


def samples(seed: int, count: int, dtype: type = np.float32) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [{"x": (generator.standard_normal((i + 1, K)) * (i + 1)).astype(dtype)} for i in range(count)]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("dtype", list(ONNX_TYPE), ids=str)
def test_amax_over_all_samples(dtype: torch.dtype, external: bool, tmp_path: Path, seed: int) -> None:
    mlp = Mlp(tmp_path, seed, dtype, external)
    assert (tmp_path / "weights.bin").exists() == external
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    data = samples(seed, 3, np.float16 if dtype == torch.float16 else np.float32)
    names = ["hidden", "x", "a", "y", "hidden"]
    found = collect(mlp.path, names, data)
    assert found.samples == 3
    assert list(found.amax) == ["hidden", "x", "a", "y"]
    for name, amax in found.amax.items():
        expected = max(mlp.tensors(sample["x"])[name].abs().max().item() for sample in data)
        assert amax == pytest.approx(expected, rel=2e-3 if dtype == torch.float16 else 1e-5), name
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_samples_are_streamed_and_progress_told(tmp_path: Path, seed: int) -> None:
    mlp = Mlp(tmp_path, seed, torch.float32, external=False)
    events: list[object] = []

    def stream() -> Iterator[dict[str, np.ndarray]]:
        for i, sample in enumerate(samples(seed, 3)):
            events.append(f"read {i}")
            yield sample

    collect(mlp.path, ["hidden"], stream(), progress=lambda done, total: events.append((done, total)))
    assert events == ["read 0", (1, 0), "read 1", (2, 0), "read 2", (3, 0)]
    events.clear()
    collect(mlp.path, ["hidden"], samples(seed, 2), progress=lambda done, total: events.append((done, total)))
    assert events == [(1, 2), (2, 2)]


def test_tensors_that_hold_nan_or_inf_are_named(tmp_path: Path, seed: int) -> None:
    mlp = Mlp(tmp_path, seed, torch.float32, external=False)
    for bad in (np.nan, np.inf, 3e38):
        sample = samples(seed, 3)[2]
        sample["x"][1, 3] = bad  # one row of three: a maximum alone would not show it
        with pytest.raises(CalibrationError, match=r"sample 1 makes tensor (a|hidden) NaN or Inf"):
            collect(mlp.path, ["a", "hidden"], [*samples(seed, 1), sample])


def test_errors_name_the_fault(tmp_path: Path, seed: int) -> None:
    mlp = Mlp(tmp_path, seed, torch.float32, external=True)
    with pytest.raises(CalibrationError, match="no tensor named nowhere"):
        collect(mlp.path, ["hidden", "nowhere"], samples(seed, 1))
    with pytest.raises(CalibrationError, match="no calibration sample"):
        collect(mlp.path, ["hidden"], [])
    with pytest.raises(CalibrationError, match="sample 0 does not run"):
        collect(mlp.path, ["hidden"], [{"x": np.zeros((2, K + 1), np.float32)}])
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(CalibrationError, match=r"weights.bin' of tensor .* is missing"):
        collect(mlp.path, ["hidden"], samples(seed, 1))


def test_statistics_survive_the_file(tmp_path: Path) -> None:
    statistics = Statistics({"a": 1.5, "b/c": 3.0000001e-30}, 7)
    statistics.save(tmp_path / "s.json")
    assert Statistics.load(tmp_path / "s.json") == statistics
    assert [file.name for file in tmp_path.iterdir()] == ["s.json"]


def test_a_save_takes_away_its_own_files_alone(tmp_path: Path) -> None:
    file, folder = tmp_path / "s.statistics.json", tmp_path / "s.statistics"
    with_arrays = Statistics({"a": 1.0}, 1, {"a": {"mean_square": np.ones(16, np.float32)}})
    with_arrays.save(file)
    Statistics({"a": 1.0}, 1).save(file)
    assert not folder.exists()
    with_arrays.save(file)
    (folder / "notes.txt").write_text("the user's")
    Statistics({"a": 2.0}, 1).save(file)
    assert [left.name for left in folder.iterdir()] == ["notes.txt"]
    assert Statistics.load(file).amax == {"a": 2.0}


def test_arrays_of_what_cannot_be_read_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may fail for a moment."""
    file = tmp_path / "s.statistics.json"
    Statistics({"a": 1.0}, 1, {"a": {"mean_square": np.ones(16, np.float32)}}).save(file)
    read_text = Path.read_text

    def failing(path: Path, *arguments: Any) -> str:
        if path == file:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_text(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        statistics_file.write_state(file, {}, {})
    assert Statistics.load(file).arrays["a"]["mean_square"].sum() == 16


@pytest.mark.parametrize("external", [False, True])
def test_statistics_of_another_model_are_refused(external: bool, tmp_path: Path, seed: int) -> None:
    """Its tensors have the same names."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = (Mlp(folder, seed + i, torch.float32, external).path for i, folder in enumerate(folders))
    file = tmp_path / "s.statistics.json"
    collect(one, ["hidden"], samples(seed, 2)).save(file)
    assert Statistics.load(file, one) == Statistics.load(file)
    with pytest.raises(CalibrationError, match=r"s\.statistics\.json: .* another model than .*other.*calibrate again"):
        Statistics.load(file, other)
    Statistics({"hidden": 1.0}, 2).save(file)  # nothing says of which model
    with pytest.raises(CalibrationError, match="another model"):
        Statistics.load(file, one)


def test_a_model_is_the_same_wherever_it_lies(tmp_path: Path, seed: int) -> None:
    """An export under another name names its external data otherwise, and its metadata may differ."""
    file, path = tmp_path / "s.statistics.json", Mlp(tmp_path, seed, torch.float32, external=True).path
    collect(path, ["hidden"], samples(seed, 2)).save(file)
    proto = onnx.load(path)
    helper.set_model_props(proto, {"exported": "today"})
    onnx.save(proto, tmp_path / "b.onnx", save_as_external_data=True, location="b.onnx.data", size_threshold=0)
    assert Statistics.load(file, tmp_path / "b.onnx").amax.keys() == {"hidden"}


@pytest.mark.parametrize("version", ["trt-nvfp4 activation statistics 2", "other"])
def test_statistics_of_another_version_say_what_to_do(version: str, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"format": version, "samples": 1, "amax": {"a": 1.0}, "arrays": {}}))
    with pytest.raises(CalibrationError, match=rf"s\.json.*its format is '{version}'.*calibrate again"):
        Statistics.load(file)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Statistics({"a": 1.0}, 1)
    old.save(tmp_path / "s.json")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OSError, match="No space"):
        Statistics({"a": 2.0}, 1).save(tmp_path / "s.json")
    assert [file.name for file in tmp_path.iterdir()] == ["s.json"]
    assert Statistics.load(tmp_path / "s.json") == old


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does not."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def short(*_: object) -> None:
        raise OSError("65536 requested and 24544 written")

    arrays = {"a": {"channel_amax": np.ones(3, np.float32)}}
    cases = [
        ("pathlib.Path.write_text", no_space, "s.statistics.json"),
        ("numpy.save", no_space, r"s.statistics/.*\.npy"),
        ("numpy.save", short, r"s.statistics/.*\.npy"),
    ]
    for writes, fail, file in cases:
        with monkeypatch.context() as patched:
            patched.setattr(writes, fail)
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{file}"):
                Statistics({"a": 1.0}, 1, arrays).save(tmp_path / "s.statistics.json")


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Statistics({"a": 1.0}, 1, {"a": {"channel_amax": np.ones(3, np.float32)}}).save(tmp_path / "s.statistics.json")
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix: file.stat().st_mode & 0o777 for file in files} == {".json": 0o644, ".npy": 0o644}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', None])
def test_files_that_hold_no_statistics(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "s.json").write_text(text)
    with pytest.raises(CalibrationError, match=r"s.json: not a file of activation statistics"):
        Statistics.load(tmp_path / "s.json")


def test_arrays_that_are_not_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.statistics.json"
    Statistics({"a": 1.0}, 1, {"a": {"mean_square": np.ones(16, np.float32)}}).save(file)
    (array,) = (tmp_path / "s.statistics").iterdir()
    np.save(array, np.ones(16))
    with pytest.raises(CalibrationError, match=r"mean_square of tensor a is float64, expected float32"):
        Statistics.load(file)
    for content in (b"", b"\x93NUMPY\1\0\x02\0(\n", b"PK\3\4"):
        array.write_bytes(content)
        with pytest.raises(CalibrationError, match=r"\.npy: not an array of activation statistics"):
            Statistics.load(file)
    array.unlink()
    with pytest.raises(CalibrationError, match=r"by itself: its arrays lie in the folder \S+ beside it"):
        Statistics.load(file)


@pytest.mark.parametrize("name", ["../secret.npy", "/dev/zero", "link"])
def test_arrays_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    file = tmp_path / "s.statistics.json"
    Statistics({"a": 1.0}, 1, {"a": {"mean_square": np.ones(16, np.float32)}}).save(file)
    np.save(tmp_path / "secret.npy", np.ones(16, np.float32))
    (tmp_path / "s.statistics" / "link").symlink_to(tmp_path / "secret.npy")
    content = json.loads(file.read_text())
    content["arrays"]["a"]["mean_square"] = name
    file.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match="outside the model's folder"):
        Statistics.load(file)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_statistics_that_are_no_magnitudes(value: float, tmp_path: Path) -> None:
    Statistics({"a": value}, 1).save(tmp_path / "s.json")
    with pytest.raises(CalibrationError, match="negative or not finite"):
        Statistics.load(tmp_path / "s.json")


def test_weights_are_not_read_into_the_model(tmp_path: Path, seed: int) -> None:
    """The file that ONNX Runtime gets refers to the external weights: the same bytes serve without a copy."""
    mlp = Mlp(tmp_path, seed, torch.bfloat16, external=True)
    weights = tmp_path / "weights.bin"
    first = collect(mlp.path, ["hidden"], samples(seed, 1)).amax["hidden"]
    doubled = numpy_helper.to_array(onnx.load(mlp.path).graph.initializer[0]).astype(np.float32) * 2
    raw = torch.from_numpy(doubled).bfloat16().view(torch.uint8).numpy().tobytes()
    weights.write_bytes(raw + weights.read_bytes()[len(raw) :])
    second = collect(mlp.path, ["hidden"], samples(seed, 1)).amax["hidden"]
    assert second > 1.5 * first
