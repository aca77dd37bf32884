"""The C++ programs compile against TensorRT's headers and link with TensorRT-RTX; what they say where they cannot run.

TensorRT's headers are in no Python package: TENSORRT_INCLUDE_DIR names their folder, as for the plugin library. Without
them the programs are compiled, and not linked, against the declarations in `declared/`. JSON's headers
(nlohmann-json3-dev) are the system's, or in a folder of CPLUS_INCLUDE_PATH.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import torch

from trt_nvfp4.plugins.compile.toolchain import find_nvcc

SOURCES = Path(__file__).parents[2] / "examples" / "cpp"
DECLARED = Path(__file__).with_name("declared")
SYSTEM = (Path("/usr/include"), Path(f"/usr/include/{os.uname().machine}-linux-gnu"))
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def _folder_with(header: str, *named: str) -> Path | None:
    folders = [Path(name) for name in named if name] or SYSTEM
    return next((folder for folder in folders if (folder / header).is_file()), None)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles one of the programs, warnings as errors, and links it with TensorRT-RTX; once."""
    headers = _folder_with("NvInfer.h", os.environ.get("TENSORRT_INCLUDE_DIR", ""))
    rtx = find_spec("tensorrt_rtx_libs")
    if headers is None:
        pytest.skip("TensorRT's headers are not here; name their folder in TENSORRT_INCLUDE_DIR")
    if rtx is None or rtx.origin is None:
        pytest.skip("TensorRT-RTX's library is not here")
    library, folder, toolchain = (
        Path(rtx.origin).with_name("libtensorrt_rtx.so.1"),
        tmp_path_factory.mktemp("cpp"),
        find_nvcc(),
    )
    warnings = ["-Xcompiler=-Wall,-Wextra,-Werror", f"-isystem={headers}"]

    def build(name: str) -> Path:
        out = folder / name
        if not out.is_file():
            source = SOURCES / f"{name}.cpp"
            linked = [f"-Xlinker={library}", f"-Xlinker=-rpath={library.parent}", *toolchain.link_flags()]
            subprocess.run([toolchain.nvcc, "-std=c++17", "-O0", *warnings, source, *linked, "-o", out], check=True)
        return out

    return build


def _error(*command: str | Path, given: str = "") -> str:
    """The one line that a program ends with."""
    done = subprocess.run(command, check=False, input=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    return done.stderr.strip()


def test_generate_says_what_is_wrong(program: Callable[[str], Path], tmp_path: Path) -> None:
    generate = program("generate")
    assert "usage: generate ENGINE MAX_NEW_TOKENS" in _error(generate)
    assert "MAX_NEW_TOKENS: expected 1 or more" in _error(generate, tmp_path, "0")
    assert "MAX_NEW_TOKENS: expected a whole number, found '12x'" in _error(generate, tmp_path, "12x")
    for stop in ("", "two", "9" * 20):
        assert f"STOP_TOKEN: expected a whole number, found '{stop}'" in _error(generate, tmp_path, "4", stop)
    for prompt in ("", "1 x", "one"):
        assert "the prompt must be token ids" in _error(generate, tmp_path, "4", given=prompt)
    assert "none.engine: cannot be read" in _error(generate, tmp_path / "none.engine", "4", given="1 2")


@WITHOUT_GPU
def test_generate_without_a_gpu(program: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "a.engine").write_bytes(b"engine")
    assert "this program needs an NVIDIA GPU: " in _error(program("generate"), tmp_path / "a.engine", "4", given="1 2")


@pytest.mark.parametrize("name", ["generate", "parts", "generate_parts"])
def test_programs_compile_without_tensorrts_headers(name: str, tmp_path: Path) -> None:
    if name != "generate":
        _require_json()
    flags = ["-std=c++17", "-O0", "-Xcompiler=-Wall,-Wextra,-Werror,-fsyntax-only", f"-isystem={DECLARED}"]
    compiled = [find_nvcc().nvcc, *flags, "-c", SOURCES / f"{name}.cpp", "-o", tmp_path / "o"]
    subprocess.run(compiled, check=True)


@pytest.mark.skipif(which("cmake") is None, reason="cmake is not here")
@pytest.mark.parametrize("has_headers", [False, True])
def test_what_cmake_finds(has_headers: bool, tmp_path: Path) -> None:
    """CUDA and the library in Python's packages; the headers, in no package, are named with what to do."""
    if find_spec("tensorrt_rtx_libs") is None:
        pytest.skip("TensorRT-RTX's library is not here")
    command = ["cmake", "-S", SOURCES, "-B", tmp_path, "-DTENSORRT_RTX=ON", f"-DPYTHON={sys.executable}"]
    command += [f"-DTENSORRT_ROOT={DECLARED if has_headers else tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not has_headers and _folder_with("NvInfer.h") is None:
        assert "TensorRT's headers (NvInfer.h): unpack TensorRT's archive" in " ".join(done.stderr.split())
        assert "library" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr


#: Program, arguments behind the folder, the task that it is for, and what it says of the other.
OF_PARTS = [
    ("parts", [], "run", "this model generates tokens; see generate_parts.cpp"),
    ("generate_parts", ["4"], "generate", "this model generates no tokens; see parts.cpp"),
]


@pytest.mark.parametrize(("name", "behind", "task", "of_other"), OF_PARTS, ids=["parts", "generate_parts"])
def test_parts_say_what_is_wrong(
    program: Callable[[str], Path], tmp_path: Path, name: str, behind: list[str], task: str, of_other: str
) -> None:
    parts = _of_parts(program, name)
    assert f"usage: {name} FOLDER" in _error(parts)
    assert "components.json: cannot be read" in _error(parts, tmp_path, *behind)
    (tmp_path / "components.json").write_text("{")
    assert "components.json: not JSON" in _error(parts, tmp_path, *behind)
    for changed, words in (
        ({"task": "run" if task == "generate" else "generate"}, of_other),
        ({"parts": [{"name": "../x", "inputs": {}, "outputs": {}, "loop": None}]}, "'../x' is no file name"),
        ({"parts": [{"inputs": {}}]}, "not a manifest of parts"),
    ):
        (tmp_path / "components.json").write_text(json.dumps({"task": task, "flows": [], "parts": [], **changed}))
        assert words in _error(parts, tmp_path, *behind)
    if name == "generate_parts":
        assert "MAX_NEW_TOKENS: expected 1 or more" in _error(parts, tmp_path, "0")
        assert "STOP_TOKEN: expected a whole number, found '2x'" in _error(parts, tmp_path, "4", "2x")
        assert "the prompt must be token ids" in _error(parts, tmp_path, "4", given="one")


@WITHOUT_GPU
@pytest.mark.parametrize(("name", "behind", "task"), [each[:3] for each in OF_PARTS], ids=["parts", "generate_parts"])
def test_parts_without_a_gpu(
    program: Callable[[str], Path], tmp_path: Path, name: str, behind: list[str], task: str
) -> None:
    (tmp_path / "components.json").write_text(json.dumps({"task": task, "flows": [], "parts": []}))
    assert "this program needs an NVIDIA GPU: " in _error(_of_parts(program, name), tmp_path, *behind)


def _of_parts(program: Callable[[str], Path], name: str) -> Path:
    _require_json()
    return program(name)


def _require_json() -> None:
    if _folder_with("nlohmann/json.hpp", *os.environ.get("CPLUS_INCLUDE_PATH", "").split(":")) is None:
        pytest.skip("nlohmann's JSON is not here (nlohmann-json3-dev)")
