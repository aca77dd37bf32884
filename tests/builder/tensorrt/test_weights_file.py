"""The file of stripped weights: safetensors by safetensors' own reader, named by its content, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from weights_files import BROKEN, file_of, written

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.tensorrt import weights_file
from trt_nvfp4.builder.tensorrt.weights_file import METADATA, read_header


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "a/weight": rng.integers(-128, 128, (33, 17)).astype(np.int8),
        'b "quoted" \u00e9': rng.standard_normal((5,)).astype(np.float32),
        "c": rng.standard_normal((3, 2, 7)).astype(np.float16),
    }


def test_safetensors_reads_it(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    file = written(tmp_path, arrays)
    assert [path.name for path in tmp_path.iterdir()] == [f"weights-{file.digest[:16]}.safetensors"]
    with safe_open(file.path, framework="np") as opened:
        assert opened.metadata()[METADATA] == file.digest
        assert {name: opened.get_tensor(name).tolist() for name in opened.keys()} == {  # noqa: SIM118
            name: array.tolist() for name, array in arrays.items()
        }
    header = read_header(file.path)
    assert sorted(header.tensors, key=str) == sorted(file.tensors, key=str)
    for tensor in header.tensors:
        assert b"".join(header.chunks(tensor)) == arrays[tensor.name].tobytes()
        assert tensor.begin % weights_file.BYTES[tensor.dtype] == 0


def test_the_digest_is_of_the_content(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    def digest(name: str, changed: dict[str, np.ndarray]) -> str:
        (tmp_path / name).mkdir()
        return written(tmp_path / name, changed).digest

    same = digest("same", arrays)
    assert digest("reversed", dict(reversed(arrays.items()))) == same
    other = dict(arrays, c=arrays["c"].copy())
    other["c"][0, 0, 0] += 1
    reshaped = dict(arrays, c=arrays["c"].reshape(42))
    renamed = {f"x{name}": array for name, array in arrays.items()}
    found = {same, digest("other", other), digest("reshaped", reshaped), digest("renamed", renamed)}
    assert len(found) == 4


def test_the_name_of_a_network() -> None:
    digest = "0123456789abcdef" * 4
    assert weights_file.named_digest(weights_file.ENGINE_NAME + digest) == digest
    for name in ("Unnamed Network 0", "", weights_file.ENGINE_NAME, weights_file.ENGINE_NAME + "../" + digest[3:]):
        assert weights_file.named_digest(name) is None


@pytest.mark.parametrize(("header", "data"), BROKEN)
def test_what_is_no_such_file_is_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    with pytest.raises(ModelFaultError, match="not a file of weights, or a damaged one"):
        read_header(file_of(tmp_path / "w.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_that_is_not_there(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(BuilderError, match="too few for its header"):
        read_header(tmp_path / "w")


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "w"):
        with pytest.raises(BuilderError, match="needs it beside it; copy the two together"):
            read_header(path)
