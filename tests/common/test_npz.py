"""Files of arrays that anybody may have made."""

import os
from pathlib import Path

import numpy as np
import pytest

from trt_nvfp4.common.npz import read_npz


def test_arrays_come_back(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = {"a": rng.standard_normal((3, 4)), "b": rng.integers(0, 9, 5)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = read_npz(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_other_files(tmp_path: Path, rng: np.random.Generator) -> None:
    file = tmp_path / "a.npz"
    np.savez_compressed(file, a=rng.standard_normal((30, 40)))
    whole = file.read_bytes()
    np.save(tmp_path / "one.npy", rng.standard_normal(3))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    for broken in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:60] + whole[70:],
        whole.replace(whole[60:64], b"abcd"),
    ):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"."):
            read_npz(file)
    for name in ("one.npy", "objects.npz"):
        with pytest.raises(ValueError, match=r"."):
            read_npz(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not an ordinary file"):
        read_npz(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such file"):
        read_npz(tmp_path / "none.npz")


def test_arrays_larger_than_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 20, np.int8))
    with pytest.raises(ValueError, match="MB are free"):
        read_npz(tmp_path / "a.npz", copies=1 << 30)
