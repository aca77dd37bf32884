"""ONNX's shape inference, converter and checker end their process at some graphs: that is one message, not the end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from trt_nvfp4 import surgeon
from trt_nvfp4.builder.export.without_plugins import inline_plugins
from trt_nvfp4.builder.inputs.possible_shapes import check_possible
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shapes import Profile
from trt_nvfp4.graph_passes.load import faults, node_checks, normalize
from trt_nvfp4.graph_passes.load.faults import blaming
from trt_nvfp4.graph_passes.load.source import ModelError, load

pytestmark = pytest.mark.usefixtures("onnx_in_processes")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "m.onnx", "y = Relu(x)")


def saved(path: Path, body: str) -> Path:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x) => (float[batch, 8] y) {{ {body} }}'
    onnx.save(parser.parse_model(text), path)
    return path


def dies(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_graph_that_ends_this_version_of_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not refused before, as it is since it was found. What ONNX makes of it depends on what lies in memory."""
    path = saved(
        tmp_path / "m.onnx", "i = Constant <value = int64[1, 1] {0}> ()  y = GatherND <batch_dims = -5> (x, i)"
    )
    with pytest.raises(ModelError, match="batch_dims is -5"):
        load(path)
    for module in (node_checks, normalize):
        monkeypatch.setattr(module, "check_counts", lambda node: None)
    with pytest.raises(ModelError, match=r"m\.onnx: "):
        load(path)


def test_shapes_at_which_onnx_dies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load(path)
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", dies)
    for run in (
        lambda: load(path),
        lambda: check_possible(path, source, [{"x": Profile((1, 8), (1, 8), (3, 8))}]),
        lambda: subgraph_tokens(source, []),
    ):
        with pytest.raises(ModelError, match=r"m.onnx: ONNX cannot .*: its process ended early \(SIGKILL\)"):
            run()
    with pytest.raises(surgeon.SurgeonError, match=r"m\.onnx: ONNX cannot infer its types"):
        surgeon.to_gs(path)


@pytest.mark.parametrize("name", ["version_converter.convert_version", "inliner.inline_local_functions"])
def test_other_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = """<ir_version: 10, opset_import: ["": 17, "f": 1]> g (float[b, 8] x) => (float[b, 8] y) { y = f.act(x) }
        <domain: "f", opset_import: ["": 17]> act (x) => (y) { y = Relu(x) }"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    load(tmp_path / "m.onnx")
    monkeypatch.setattr(f"onnx.{name}", dies)
    with pytest.raises(ModelError, match="its process ended early"):
        load(tmp_path / "m.onnx")
    if name.startswith("inliner"):
        with pytest.raises(ModelError, match="its process ended early"):
            inline_plugins(tmp_path / "m.onnx", tmp_path / "out.onnx")
        assert not (tmp_path / "out.onnx").exists()


def test_a_checker_that_dies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked where a pass failed in a way that nobody foresaw."""
    monkeypatch.setattr(onnx.checker, "check_model", dies)
    with pytest.raises(ModelError, match=r"m.onnx: not valid ONNX: its process ended early \(SIGKILL\)"), blaming(path):
        raise KeyError("a defect, or not")


def takes_all_memory(*arguments: Any, **options: Any) -> None:
    bytes(1 << 42)


def recurses(*arguments: Any, **options: Any) -> None:
    raise RecursionError("too deep")


@pytest.mark.parametrize(
    ("module", "name", "fails"),
    [(onnx.checker, "check_model", takes_all_memory), (faults, "checked", recurses)],
    ids=["memory", "recursion"],
)
def test_what_says_nothing_of_the_model(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fails: Callable[..., None]
) -> None:
    """A valid model is not blamed, and what failed first is told."""
    monkeypatch.setattr(module, name, fails)
    with pytest.raises(KeyError, match="a defect, or not"), blaming(path):
        raise KeyError("a defect, or not")
