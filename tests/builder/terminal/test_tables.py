"""Tables on the terminal: 80 columns, equal layers in one row, plain in a pipe."""

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from trt_nvfp4.builder.accuracy import metrics
from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, console, generate, inspect_engine
from trt_nvfp4.builder.report.report import subgraph_tables
from trt_nvfp4.builder.terminal.tables import equal_reasons, joined_name
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode


def entry(name: str, **others: Any) -> dict[str, Any]:
    shapes = {"in_features": 4096, "intermediate_features": 14336, "out_features": 4096}
    reason = f"NVFP4 weights: tensor '{name}.weight'"
    common = {"kind": "gated_mlp", "shapes": shapes, "decision": "nvfp4_w4a16", "kernels": "W4A16: decoded"}
    return {"name": name, "reason": reason, "reason_code": None, "realized": "nvfp4 plugin", **common, **others}


def lines_of(tables: list[Any], width: int) -> list[str]:
    written = Console(file=io.StringIO(), width=width)
    for table in tables:
        written.print(table)
    return written.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_equal_layers_are_one_row_of_80_columns() -> None:
    names = [f"model.layers.{layer}.mlp" for layer in range(32)]
    others = [entry("model.layers.32.mlp", decision="fp8"), entry("vision.mlp")]
    lines = lines_of(subgraph_tables([*map(entry, names), *others]), 80)
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "4096-14336-4096" in line]
    assert [row[:3] for row in rows] == [
        ["model.layers.{0-31}.mlp", "32", "gated_mlp"],
        ["model.layers.32.mlp", "1", "gated_mlp"],
        ["vision.mlp", "1", "gated_mlp"],
    ]
    said = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("33 nvfp4_w4a16 model.layers.{0-31}.mlp and 1 more: NVFP4") for line in said)
    assert "34 on W4A16 model.layers.{0-32}.mlp and 1 more: decoded" in said


def test_whole_layers_that_nobody_asked_for_have_no_row() -> None:
    layer = entry("model.layers.0", kind="decoder", decision="keep", kernels="", reason_code=ReasonCode.KIND)
    shown = "\n".join(lines_of(subgraph_tables([layer, entry("model.layers.0.mlp")]), 80))
    assert "model.layers.0.mlp" in shown
    assert "decoder" not in shown


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["a.0.b"], "a.0.b"),
        (["a.0.b", "a.1.b", "a.3.b", "a.7.b", "a.8.b"], "a.{0-1,3,7-8}.b"),
        (["b.10.w4", "b.9.w4"], "b.{9-10}.w4"),
        (["MatMul_0042"], "MatMul_0042"),
        (["val_1e05"], "val_1e05"),
        (["a.0.val_1e05", "a.1.val_1e05"], "a.{0-1}.val_1e05"),
    ],
)
def test_joined_names(names: list[str], joined: str) -> None:
    assert joined_name(names) == joined


def test_reasons_that_differ_are_apart() -> None:
    reasons = [("a", "fp8", "K of 'a' is 120"), ("b", "fp8", "K of 'b' is 120"), ("c", "fp8", "K of 'c' is 24")]
    assert equal_reasons([*reasons, ("d", "keep", "no K")]) == [
        (["a", "b"], "fp8", "K of 'a' is 120 (and 1 alike)"),
        (["c"], "fp8", "K of 'c' is 24"),
        (["d"], "keep", "no K"),
    ]


def test_comparisons_with_kl_fit_80_columns() -> None:
    def row(name: str, kind: str) -> metrics.Agreement:
        numbers = {"cosine": 0.998123, "sqnr_db": 34.56, "max_abs": 1.2345e-05, "max_rel": 1.2345e-05}
        return metrics.Agreement(name, kind, argmax=0.98765, kl=1.2345e-05, **numbers)

    rows = [row("logits", "output"), *(row(f"model.layers.{k}.mlp", "subgraph") for k in range(2))]
    lines = lines_of([metrics.table("a.engine against a.onnx (16 samples)", rows)], 80)
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["model.layers.1.mlp"] and line.split()[-1] == "1.23e-05" for line in lines)


def test_piped_tables_are_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is a line, however long, and there are no lines around cells."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a_very_long_name_of_a_module." * 6 + "mlp"
    for table in subgraph_tables([entry(name)]):
        console.output.print(table)
    written = capsys.readouterr().out
    assert written.isascii()
    row = next(line for line in written.splitlines() if line.startswith(name))
    assert row.split() == [name, "1", "gated_mlp", "4096-14336-4096", "nvfp4_w4a16", "nvfp4", "plugin"]


@pytest.mark.parametrize("command", [bench_engine, build_engine, compare_engine, generate, inspect_engine])
def test_flags_take_no_value_in_help(command: Any) -> None:
    shown = CliRunner().invoke(command.app, ["--help"], env={"COLUMNS": "100"}).output
    assert "--debug" in shown
    assert "bool" not in shown.lower()
