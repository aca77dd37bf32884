"""The library in TensorRT's own hands: it loads in the registries, and engines of its plugins build without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recurrent_cases import CAUSAL_CONV, LINEAR_ATTENTION

from trt_nvfp4.plugins.compile.kernel_groups import OpUse, groups_of
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS

HERE = Path(__file__).parent
ALL_OPS = [*OPS, *STANDARD_OPS]
_BOTH_FLAVOURS = """
import sys
import tensorrt_lean_bindings as lean, tensorrt_rtx as rtx
from pathlib import Path
from trt_nvfp4.builder.tensorrt.backend import Backend
counts = []
for trt in (rtx, lean):
    backend = Backend("tensorrt_rtx")
    backend.trt = trt
    for _ in range(2):  # the second time there is nothing to do
        backend.load_plugins(Path(sys.argv[1]))
        creators = trt.get_plugin_registry().all_creators
        counts.append(sum(c.name.startswith(("NVFP4", "FP8", "CachedA", "LinearAtt", "CausalConv")) for c in creators))
print(*counts)
"""
_LIST_CREATORS = """
import importlib, json, sys
trt = importlib.import_module(sys.argv[1])
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[2])
ours = [c for c in registry.all_creators if c.name.startswith(("NVFP4", "FP8", "CachedA", "LinearAtt", "CausalConv"))]
print(json.dumps([(c.name, c.plugin_version, c.plugin_namespace) for c in ours]))
"""


def python(*arguments: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, cwd=HERE
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_loads_in_the_registry(library: Path, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    listed = python("-c", _LIST_CREATORS, module, library)
    assert sorted(json.loads(listed)) == sorted([op, "1", ""] for op in ALL_OPS)


def test_two_flavours_of_tensorrt_share_the_library(library: Path) -> None:
    for module in ("tensorrt_rtx", "tensorrt_lean_bindings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    assert python("-c", _BOTH_FLAVOURS, library).split() == [str(len(ALL_OPS))] * 4


@pytest.fixture
def loader_path(tmp_path: Path) -> str:
    """The parser opens libtensorrt_rtx.so and the wheel has only .so.1: a folder with a link, outside site-packages."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("tensorrt_rtx is not installed")
    (tmp_path / "libtensorrt_rtx.so").symlink_to(Path(spec.submodule_search_locations[0]) / "libtensorrt_rtx.so.1")
    return str(tmp_path)


def build(library: Path, loader_path: str, op: str, dtype: str, attributes: dict[str, Any]) -> dict[str, Any]:
    program = HERE / "build_in_tensorrt_rtx.py"
    printed = python(program, library, op, dtype, json.dumps(attributes), LD_LIBRARY_PATH=loader_path)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("op", "dtype", "attributes"),
    [
        ("NVFP4Linear", "float16", {"activation": 3, "quantize_activations": 1}),
        ("NVFP4GatedMLP", "bfloat16", {"activation": 5, "quantize_activations": 0, "alpha": 1.702, "limit": 7.0}),
        ("NVFP4PersistentMLP", "float16", {"activation": 3, "gated": 1, "norm": 1, "residual": 1, "epsilon": 1e-5}),
        ("NVFP4Quantize", "float32", {"norm": 1, "add_residual": 1, "epsilon": 1e-6}),
    ],
)
def test_builds_an_engine(library: Path, loader_path: str, op: str, dtype: str, attributes: dict[str, Any]) -> None:
    result = build(library, loader_path, op, dtype, attributes)
    assert result["errors"] == []
    assert result["plugin_error"] == ""
    # The library travels in the engine.
    assert result["engine_bytes"] > library.stat().st_size
    custom = [line for line in result["layers"].splitlines() if "LayerType: custom_layer" in line]
    assert len(custom) == 1
    assert "the_plugin" in custom[0]


CACHES = ("past_key", "past_value", "present_key", "present_value")
STATES = ("past_conv", "present_conv", "past_state", "present_state")


@pytest.mark.parametrize("model", ["T", "E4M3", "recurrent"])
def test_plugins_read_and_write_the_networks_caches_and_states(loader_path: str, model: str) -> None:
    """Under two profiles, and nothing is copied on the way: the plugins' ports are the network's. Plugins serve ONNX's
    own recurrent operators."""
    recurrent = model == "recurrent"
    ops = [CAUSAL_CONV, LINEAR_ATTENTION] if recurrent else ["CachedAttention"]
    library = build_library("sm_120a", groups=groups_of(OpUse(op, {}) for op in ops))
    program = HERE / "build_attention_in_tensorrt_rtx.py"
    printed = python(program, library, model, LD_LIBRARY_PATH=loader_path)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert (result["errors"], result["plugin_error"]) == ([], "")
    assert result["engine_bytes"] > library.stat().st_size
    layers = [line for line in result["layers"].splitlines() if "LayerType: custom_layer" in line]
    assert len(layers) == 2 * len(ops)  # one for each profile
    for port in STATES if recurrent else CACHES:
        assert sum(f"Name: {port}" in layer for layer in layers) == 2
    assert "reformat" not in result["layers"].lower()


def test_a_refused_attribute_fails_the_parse(library: Path, loader_path: str) -> None:
    result = build(library, loader_path, "NVFP4Linear", "float16", {"activation": 7})
    assert result["engine_bytes"] == 0
    assert "activation must be 0 to 6, it is 7" in result["plugin_error"]


@pytest.mark.parametrize("count", [2, 3, 10])
def test_engines_load_together(library: Path, loader_path: str, tmp_path: Path, count: int) -> None:
    """In one runtime where the library lies beside them, in one runtime each where they carry it."""
    program = HERE / "load_in_tensorrt_rtx.py"
    printed = python(program, library, tmp_path, str(count), LD_LIBRARY_PATH=loader_path)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    with_library, without = result["sizes"]
    assert without < library.stat().st_size < with_library
    expected = {"creators": sorted(ALL_OPS), "collisions": 0}
    for runtime in (result["one_bare"], *result["each_embedded"], *result["each_version"]):
        assert {**runtime, "creators": sorted(runtime["creators"])} == expected
    # What the first two are for: TensorRT registers the library that each engine carries.
    assert result["one_embedded"]["collisions"] == count - 1
