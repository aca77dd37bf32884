"""A decoder's bundle carries a generate.py that needs Python, NumPy, TensorRT's package and a CUDA binding alone."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnx_models import fake_gpu
from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE, ModelFaultError
from trt_nvfp4.builder.model.decoder_contract import Decoder
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import bundle

# Stand-ins for TensorRT and CUDA; what the bundle's own modules import is checked, as the stand-ins need more.
_DEVICE = """
import builtins, runpy, sys, types
from importlib.machinery import ModuleSpec
sys.path += {paths}
from fake_gpu import TRT, FakeEngine, FakeRuntime
runtime = FakeRuntime()
trt = types.ModuleType("tensorrt_rtx")
trt.__spec__, trt.__version__ = ModuleSpec("tensorrt_rtx", None), "1.7.1"
trt.TensorIOMode, trt.ILogger = TRT.TensorIOMode, type("ILogger", (), dict(ERROR=1, INTERNAL_ERROR=0, WARNING=2))
class Runtime:
    def __init__(self, log): pass
    def deserialize_cuda_engine(self, data): return FakeEngine({model!r}, runtime, [(1, 16), (1, 1)], batch=4)
trt.Runtime = Runtime
sys.modules |= {{"tensorrt_rtx": trt, "cuda.bindings.runtime": runtime}}
original, allowed = builtins.__import__, sys.stdlib_module_names | {{"numpy", "trt_nvfp4"}}
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    who = (globals or {{}}).get("__name__", "")
    if who.startswith("trt_nvfp4") and not level and name.partition(".")[0] not in allowed:
        raise ImportError(f"{{who}} imports {{name}}")
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
sys.path.insert(0, {sources!r})
from trt_nvfp4.builder.cuda import driver
assert driver.__file__.startswith({sources!r})
driver.local_compute_capability = lambda: (12, 0)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def folder(tiny: TinyDecoder, tmp_path: Path) -> Path:
    """The bundle of a tiny decoder."""
    model = tiny.save(tmp_path / "tiny.onnx")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundle.write_folder(folder, find_target("rtx-blackwell"), model, [], [], options=bundle.FolderOptions(keep=True))
    return folder


def test_a_tokenizer_that_is_not_there(tiny: TinyDecoder, tmp_path: Path) -> None:
    """generate.py would miss it on the device."""
    model = tiny.save(tmp_path / "tiny.onnx")
    (tmp_path / "bundle").mkdir()
    with pytest.raises(ModelFaultError, match=f"{tmp_path / 'tokenizer'}, which holds no file of one"):
        bundle.write_folder(
            tmp_path / "bundle", find_target("rtx-blackwell"), model, [], [], options=bundle.FolderOptions(keep=True)
        )


def test_a_tokenizer_beside_the_original(tiny: TinyDecoder, tmp_path: Path) -> None:
    (tmp_path / "given" / "tokenizer").mkdir(parents=True)
    (tmp_path / "given" / "tokenizer" / "tokenizer.json").write_text("{}")
    model, original = tiny.save(tmp_path / "tiny.onnx"), tmp_path / "given" / "tiny.onnx"
    (folder := tmp_path / "bundle").mkdir()
    target = find_target("rtx-blackwell")
    bundle.write_folder(folder, target, model, [], [], options=bundle.FolderOptions(keep=True, original=original))
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "{}"


def run_on_device(folder: Path, *arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
    packages = {str(Path(module.__file__ or "").parents[1]) for module in (np, onnxruntime)}
    code = _DEVICE.format(
        paths=[str(Path(fake_gpu.__file__ or "").parent), *packages],
        model=str(folder / "model.onnx"),
        sources=str(folder / bundle.SOURCES),
        script=str(folder / bundle.GENERATE_SCRIPT),
    )
    command = [sys.executable, "-IS", "-c", code, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True)


def test_tokens_on_a_device_without_this_package(tiny: TinyDecoder, folder: Path, ragged: list[list[int]]) -> None:
    (folder / "model.engine").write_bytes(b"engine")
    ids = [word for prompt in ragged for word in ("--ids", ",".join(map(str, prompt)))]
    done = run_on_device(folder, *ids, "--max-new-tokens", 8, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [entry["token_ids"] for entry in found["generations"]] == [tiny.greedy(prompt, 8) for prompt in ragged]
    assert "24 tokens on" in done.stderr
    assert ("names no token that ends a text" in done.stderr) == (not tiny.decoder.eos_token_ids)


@pytest.mark.parametrize("engine", ["../outside.engine", "/outside.engine", 5, None])
def test_a_manifest_that_names_an_engine_outside(folder: Path, engine: object) -> None:
    (folder.parent / "outside.engine").write_bytes(b"engine")
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "engine": engine}))
    done = run_on_device(folder, "--ids", "3,4")
    assert done.returncode == MODEL_AT_FAULT
    assert "manifest.json: not a manifest of trt-nvfp4" in done.stderr


def test_the_page_names_the_commands_in_order(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert 0 < page.index("python3 build_engine.py") < page.index("python3 generate.py --prompt")


def test_an_engine_elsewhere(tiny: TinyDecoder, folder: Path, tmp_path: Path) -> None:
    engine = tmp_path / "elsewhere.engine"
    engine.write_bytes(b"engine")
    done = run_on_device(folder, "--ids", "3,4", "--max-new-tokens", 3, "--engine", engine)
    assert done.stdout == ",".join(map(str, tiny.greedy([3, 4], 3))) + "\n", done.stderr


def test_what_travels(tiny: TinyDecoder, folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    assert Decoder.parse(json.dumps(manifest["decoder"])) == tiny.decoder
    assert {"generate.py", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"} <= manifest["checksums"].keys()
    code = folder / bundle.SOURCES / "trt_nvfp4"
    carried = {str(file.relative_to(code)) for file in code.rglob("*.py")}
    assert carried == {*bundle.MODULES, *bundle.GENERATE_MODULES}
    ast.parse((folder / bundle.GENERATE_SCRIPT).read_text(), feature_version=(3, 7))  # an old Python is told so


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--ids", "1,x"], USAGE, "expected token ids such as 1,2,3"),
        ([], USAGE, "there is no prompt"),
        (["--chat", "--json"], USAGE, "there is no prompt"),
        (["--prompt-file", "/none.txt"], USAGE, "--prompt-file /none.txt: not a UTF-8 text"),
        (["--ids", "1"], MODEL_AT_FAULT, "run build_engine.py first"),
        (["--ids", "1", "--engine", "none.engine"], MODEL_AT_FAULT, "none.engine: no such engine"),
    ],
)
def test_bad_input(arguments: list[str], code: int, words: str, folder: Path) -> None:
    done = run_on_device(folder, *arguments)
    assert (done.returncode, "Traceback" in done.stderr, words in done.stderr) == (code, False, True), done.stderr


def test_text_without_transformers(folder: Path) -> None:
    (folder / "model.engine").write_bytes(b"engine")
    done = run_on_device(folder, "--prompt", "Once")
    assert (done.returncode, "pip install transformers" in done.stderr) == (UNAVAILABLE, True), done.stderr


def test_a_conversation_without_transformers(folder: Path) -> None:
    """Of stdin's lines, when the tokenizer is needed."""
    (folder / "model.engine").write_bytes(b"engine")
    done = run_on_device(folder, "--chat", given="Hello\n")
    assert (done.returncode, "pip install transformers" in done.stderr) == (UNAVAILABLE, True), done.stderr


def test_a_device_without_numpy(folder: Path) -> None:
    command = [sys.executable, "-IS", folder / bundle.GENERATE_SCRIPT, "--ids", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (UNAVAILABLE, "error: this needs the package numpy: pip install numpy\n")
