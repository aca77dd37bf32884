"""Samples from every kind of file, and every way in which they can be wrong."""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper, save
from polygraphy.json import save_json

from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, available, input_specs, load_samples, save_sample
from trt_nvfp4.common.errors import CalibrationError

SPECS = {
    "ids": InputSpec(("batch", 8), np.dtype(np.int64)),
    "x/features": InputSpec(("batch", "", 3), np.dtype(np.float32)),
}


def sample(seed: int, rows: int = 2) -> Sample:
    generator = np.random.default_rng(seed)
    return {
        "ids": generator.integers(0, 100, (rows, 8)),
        "x/features": generator.standard_normal((rows, 5, 3)).astype(np.float32),
    }


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_one_npz_file(tmp_path: Path, seed: int) -> None:
    np.savez(tmp_path / "s.npz", **sample(seed))
    samples = load_samples(tmp_path / "s.npz", SPECS)
    assert_same(list(samples), [sample(seed)])
    assert_same(list(samples), [sample(seed)])  # a second pass reads again


def test_saved_samples_are_read_back(tmp_path: Path, seed: int) -> None:
    """Whatever the inputs' names are: NumPy's savez has arguments of the first three."""
    generator = np.random.default_rng(seed)
    names = ["file", "allow_pickle", "args", "/model/x:0", "past.0.npy", "größe"]
    saved = {name: generator.standard_normal((2, 3)).astype(np.float32) for name in names}
    saved["mask"] = np.asfortranarray(generator.integers(0, 2, (3, 4)).astype(np.bool_))
    saved["step"] = np.array(generator.integers(100))
    saved["cache"] = np.zeros((1, 2, 0, 4), np.float16)
    assert save_sample(tmp_path / "s.npz", saved) == tmp_path / "s.npz"
    specs = {name: InputSpec(array.shape, array.dtype) for name, array in saved.items()}
    assert_same(list(load_samples(tmp_path / "s.npz", specs)), [saved])
    with np.load(tmp_path / "s.npz") as arrays:
        assert set(arrays) == set(saved)


def test_a_folder_of_npz_files_in_the_order_of_their_names(tmp_path: Path, seed: int) -> None:
    for i in (2, 0, 1):
        np.savez(tmp_path / f"{i}.npz", **sample(seed + i, rows=i + 1))
    assert_same(list(load_samples(tmp_path, SPECS)), [sample(seed + i, rows=i + 1) for i in range(3)])


def test_a_folder_of_npy_files(tmp_path: Path, seed: int) -> None:
    whole = sample(seed, rows=3)
    np.save(tmp_path / "ids.npy", whole["ids"])
    np.save(tmp_path / "x_features.npy", whole["x/features"])
    expected = [{name: array[i : i + 1] for name, array in whole.items()} for i in range(3)]
    assert_same(list(load_samples(tmp_path, SPECS)), expected)


def test_a_polygraphy_file(tmp_path: Path, seed: int) -> None:
    samples = [sample(seed), sample(seed + 1)]
    save_json(samples, str(tmp_path / "inputs.json"))
    assert_same(list(load_samples(tmp_path / "inputs.json", SPECS)), samples)


def test_files_are_read_when_their_turn_comes(tmp_path: Path, seed: int) -> None:
    np.savez(tmp_path / "0.npz", **sample(seed))
    (tmp_path / "1.npz").write_bytes(b"broken")
    samples = iter(load_samples(tmp_path, SPECS))
    assert_same([next(samples)], [sample(seed)])
    with pytest.raises(CalibrationError, match=r"1.npz: not a readable .npz file"):
        next(samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": np.zeros(1)}, r"the model's inputs are \['ids', 'x/features'\], found arrays named .*'extra'"),
        ({"ids": None}, r"found arrays named \['x/features'\]"),
        ({"ids": np.zeros((2, 8), np.int32)}, "ids must be int64, found int32"),
        ({"x/features": np.zeros((2, 5, 3))}, "x/features must be float32, found float64"),
        ({"ids": np.zeros((2, 9), np.int64)}, r"ids must have shape \[batch, 8\], found \[2, 9\]"),
        ({"x/features": np.zeros((2, 3), np.float32)}, r"must have shape \[batch, \?, 3\], found \[2, 3\]"),
        ({"x/features": np.full((1, 2, 3), np.nan, np.float32)}, r"x/features\[0, 0, 0\] is nan"),
        ({"x/features": np.array([[[0, 1, np.inf]]], np.float32)}, r"x/features\[0, 0, 2\] is inf"),
    ],
)
def test_samples_that_do_not_fit(change: dict[str, np.ndarray], message: str, tmp_path: Path, seed: int) -> None:
    arrays = {name: array for name, array in {**sample(seed), **change}.items() if array is not None}
    file = tmp_path / "s.npz"
    np.savez(file, **arrays)
    with pytest.raises(CalibrationError, match=message) as caught:
        list(load_samples(file, SPECS))
    assert str(file) in str(caught.value)


def test_dimensions_of_one_name_are_equal(tmp_path: Path) -> None:
    specs = {name: InputSpec(("batch", "length"), np.dtype(np.float32)) for name in "ab"}
    np.savez(tmp_path / "s.npz", a=np.ones((1, 3), np.float32), b=np.ones((1, 2), np.float32))
    with pytest.raises(CalibrationError, match="dimension length is 3 in a and 2 in b"):
        list(load_samples(tmp_path / "s.npz", specs))


def test_a_cache_may_be_empty(tmp_path: Path) -> None:
    """Before the first token of a decoder it is; other inputs hold values."""
    specs = {
        name: InputSpec(("batch", 2, f"length of {name}", 4), np.dtype(np.float32))
        for name in ("past_key_values.0.key", "x")
    }
    empty, full = (np.ones((1, 2, length, 4), np.float32) for length in (0, 3))
    np.savez(tmp_path / "s.npz", **{"past_key_values.0.key": empty, "x": full})
    assert_same(list(load_samples(tmp_path / "s.npz", specs)), [{"past_key_values.0.key": empty, "x": full}])
    np.savez(tmp_path / "s.npz", **{"past_key_values.0.key": full, "x": empty})
    with pytest.raises(CalibrationError, match=r"x is empty: it has shape \[1, 2, 0, 4\]"):
        list(load_samples(tmp_path / "s.npz", specs))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file or folder"):
        load_samples(tmp_path / "absent", SPECS)
    with pytest.raises(CalibrationError, match=r"no .npz file, and no ids.npy for the input ids"):
        list(load_samples(tmp_path, SPECS))
    save_json([], str(tmp_path / "empty.json"))
    with pytest.raises(CalibrationError, match="holds no sample"):
        list(load_samples(tmp_path / "empty.json", SPECS))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    npy = (tmp_path / "x.npy").read_bytes()
    for name, content, message in (
        ("a.json", b"{", "not a Polygraphy input file"),
        ("b.json", b'{"a": 1}', "expected a list of samples"),
        ("c.csv", b"1 2 3", "expected an .npz file, a folder"),
        ("d.npz", b"PK\x03\x04 cut", "not a readable .npz file"),
        ("e.npz", b"", "not a readable .npz file"),
        ("f.npz", npy, "not a readable .npz file"),
        ("folder/ids.npy", b"", r"ids\.npy: not a readable .npy file"),
        ("folder/ids.npy", b"\x93NUMPY\1\0\x02\0(\n", r"ids\.npy: not a readable .npy file"),
    ):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        with pytest.raises(CalibrationError, match=message):
            list(load_samples(file if file.parent == tmp_path else file.parent, SPECS))


def test_arrays_that_the_memory_does_not_hold(tmp_path: Path) -> None:
    """A small file may hold them: zeros compress a thousandfold."""
    with zipfile.ZipFile(tmp_path / "s.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", b"\0" * 1000)
    content = (tmp_path / "s.npz").read_bytes()
    # The size in the directory at the end.
    at = content.index(b"PK\1\2") + 24
    (tmp_path / "s.npz").write_bytes(content[:at] + b"\xff\xff\xff\xfe" + content[at + 4 :])
    free = psutil.virtual_memory()._replace(available=1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: free)
        with pytest.raises(CalibrationError, match=r"it takes \d{4,} MB of memory, and 1024 MB are free"):
            list(load_samples(tmp_path / "s.npz", SPECS))


@pytest.mark.parametrize("name", ["s.npz", "s.json", "s.txt"])
def test_files_that_may_never_end(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"pipe.{name}")
    for file in (tmp_path / name, tmp_path / f"pipe.{name}"):
        with pytest.raises(CalibrationError, match="not an ordinary file"):
            list(load_samples(file, SPECS))


def test_an_npz_file_with_a_broken_stream(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "s.npz"
    np.savez_compressed(file, **sample(seed, rows=500))
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo("ids.npy")
    content[entry.header_offset + 60 : entry.header_offset + 200] = b"\xff" * 140
    file.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"not a readable \.npz file"):
        list(load_samples(file, SPECS))


def test_npy_files_of_different_lengths(tmp_path: Path, seed: int) -> None:
    np.save(tmp_path / "ids.npy", sample(seed, rows=3)["ids"])
    np.save(tmp_path / "x_features.npy", sample(seed, rows=2)["x/features"])
    with pytest.raises(CalibrationError, match="different numbers of samples"):
        list(load_samples(tmp_path, SPECS))


def test_input_specs_of_a_model(tmp_path: Path) -> None:
    """Initializers among the inputs are none; bfloat16 inputs take float32; -1 is a dynamic dimension."""
    values = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, [-1, 8]),
        helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", 4]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, [None]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]),
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        values,
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["n", 4])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])],
    )
    save(helper.make_model(graph), tmp_path / "m.onnx")
    assert input_specs(tmp_path / "m.onnx") == {
        "ids": InputSpec(("", 8), np.dtype(np.int64)),
        "x": InputSpec(("n", 4), np.dtype(np.float32)),
        "mask": InputSpec(("",), np.dtype(np.bool_)),
    }


@pytest.mark.parametrize(
    ("most", "expected"), [(None, range(10)), (10, range(10)), (20, range(10)), (3, [0, 3, 6]), (1, [0])]
)
def test_samples_are_drawn_evenly(most: int | None, expected: Iterable[int], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "x.npy", np.arange(10, dtype=np.float32))
    specs = {"x": InputSpec(("batch",), np.dtype(np.float32))}
    samples = load_samples(tmp_path / "data", specs, most=most)
    assert [int(sample["x"][0]) for sample in samples] == list(expected)
    assert available(samples) == 10
    (tmp_path / "loader.py").write_text(
        "import numpy as np\ndef load_data():\n    for i in range(10):\n        yield dict(x=np.full(1, i, 'f'))\n"
    )
    first = load_samples(tmp_path / "loader.py", specs, most=most)
    assert [[int(sample["x"][0]) for sample in first] for _ in range(2)] == [list(range(min(10, most or 10)))] * 2
