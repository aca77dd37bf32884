"""Decisions and their reasons; the plan file; what a hand-edited plan may and may not say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from onnx_models.graphs import Graph, mlp_model, spec
from onnx_models.passes import EVERYTHING, plan_all
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, DEFAULT_KINDS, kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlanError, PlannedSubgraph
from trt_nvfp4.graph_passes.rewrite import calibration_tensors

Load = Callable[[onnx.ModelProto], SourceModel]


@pytest.fixture
def source(loaded: Load) -> SourceModel:
    """x -> gated MLP -> linear -> y."""
    graph = Graph(spec())
    graph.linear(graph.mlp("x", "m"), "head", 16, 8, "y")
    return loaded(graph.model(["y"]))


def decided(source: SourceModel, capabilities: Capabilities, precision: str = "auto", **options: object) -> str:
    """The MLP's decision, after checking that it comes with a reason and an op exactly if it is NVFP4."""
    plan = make_plan(source, find_subgraphs(source), capabilities, PlanOptions(precision=precision, **options))  # type: ignore[arg-type]
    (entry,) = [entry for entry in plan.subgraphs if entry.kind == "gated_mlp"]
    assert entry.reason
    assert entry.op == ("NVFP4GatedMLP" if entry.decision.startswith("nvfp4") else "")
    return entry.decision


def test_decisions(source: SourceModel) -> None:
    h200 = Capabilities("h200", nvfp4_w4a16=True, fp8=True)
    ada = Capabilities("ada", fp8=True)
    old = Capabilities("old", bf16=False)
    assert decided(source, EVERYTHING) == "nvfp4_w4a16"
    assert decided(source, EVERYTHING, calibrated=True) == "nvfp4_w4a4"
    assert decided(source, h200, calibrated=True) == "nvfp4_w4a16"
    assert decided(source, ada, "nvfp4") == "fp8"
    assert decided(source, EVERYTHING, "fp8") == "fp8"
    assert decided(source, EVERYTHING, "bf16") == "bf16"
    assert decided(source, Capabilities("plain"), "fp8") == "bf16"
    assert decided(source, old) == "keep"


@pytest.mark.parametrize(
    ("tokens", "calibrated", "decision"),
    [
        (32, True, "nvfp4_w4a16"),
        (33, True, "fp8"),
        (64, False, "nvfp4_w4a16"),
        (65, False, "fp8"),
        (None, True, "nvfp4_w4a16"),
    ],
)
def test_fp8_beyond_decoding(loaded: Load, tokens: int | None, calibrated: bool, decision: str) -> None:
    """Where a target does not compute in FP4, and nothing but "auto" was asked for."""
    source = loaded(mlp_model(spec(dtype="float16"))[0])
    subgraphs = find_subgraphs(source)
    of_each = None if tokens is None else {subgraph.name: tokens for subgraph in subgraphs}

    def planned(capabilities: Capabilities, precision: str = "auto") -> PlannedSubgraph:
        plan = make_plan(
            source, subgraphs, capabilities, PlanOptions(precision=precision, calibrated=calibrated, tokens=of_each)
        )
        return next(entry for entry in plan.subgraphs if entry.kind == "gated_mlp")

    h200 = Capabilities("h200", nvfp4_w4a16=True, fp8=True, fp8_plugins=True)
    entry = planned(h200)
    assert entry.decision == decision
    if decision == "fp8":
        most = 32 if calibrated else 64
        assert (
            f"above {most} tokens, and --opt-shapes has {tokens} (--precision nvfp4 takes NVFP4 weights)"
            in entry.reason
        )
    assert planned(h200, "nvfp4").decision == "nvfp4_w4a16"
    assert planned(EVERYTHING).decision in ("nvfp4_w4a4", "nvfp4_w4a16")
    # Without a plugin, uncalibrated weights in FP8 are multiplied in 16 bits.
    ada = planned(Capabilities("ada", nvfp4_w4a16=True, fp8=True))
    assert ada.decision == (decision if calibrated else "nvfp4_w4a16")


def test_reasons_say_what_spoke_against(source: SourceModel) -> None:
    plan = make_plan(source, find_subgraphs(source), Capabilities("ada", fp8=True), PlanOptions(calibrated=True))
    mlp, linear = plan.subgraphs
    assert "ada does not compute nvfp4_w4a4" in mlp.reason
    assert "ada does not compute nvfp4_w4a16" in mlp.reason
    assert linear.decision == "keep"
    assert ", not linear" in linear.reason


def test_include_and_exclude(source: SourceModel) -> None:
    names = {entry.kind: entry.name for entry in plan_all(source).subgraphs}
    chosen = {e.kind: e for e in plan_all(source, include=names["linear"]).subgraphs}
    assert (chosen["linear"].decision, chosen["gated_mlp"].decision) == ("nvfp4_w4a16", "keep")
    assert "--include" in chosen["gated_mlp"].reason
    chosen = {e.kind: e for e in plan_all(source, exclude=names["linear"]).subgraphs}
    assert (chosen["linear"].decision, chosen["gated_mlp"].decision) == ("keep", "nvfp4_w4a16")


@pytest.mark.parametrize(
    "options",
    [{"precision": "int8"}, {"kinds": ("conv",)}, {"include": "("}, {"exclude": "["}],
    ids=lambda o: next(iter(o)),
)
def test_wrong_options(options: dict[str, object], source: SourceModel) -> None:
    with pytest.raises(ValueError, match=r"int8|conv|regular expression"):
        plan_all(source, **options)  # type: ignore[arg-type]


def test_calibration_tensors(source: SourceModel) -> None:
    assert list(calibration_tensors(plan_all(source, calibrated=True))) == ["x", "h", "m"]
    assert calibration_tensors(plan_all(source)) == {}


def test_round_trip(source: SourceModel, tmp_path: Path) -> None:
    plan = plan_all(source)
    plan.save(tmp_path / "plan.yaml")
    read = Plan.load(tmp_path / "plan.yaml")
    assert [{**vars(e), "line": 0} for e in read.subgraphs] == [vars(e) for e in plan.subgraphs]
    assert (read.model, read.target, read.precision) == (plan.model, plan.target, plan.precision)
    assert [entry.name for entry, _ in read.check(source)] == [entry.name for entry in plan.subgraphs]
    assert all(decision in (tmp_path / "plan.yaml").read_text() for decision in Decision)
    assert [p.name for p in tmp_path.glob("*plan*")] == ["plan.yaml"]  # no temporary left


Edit = Callable[[dict[str, object], list[dict[str, object]]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "decision": (lambda plan, e: e[0].update(decision="int3"), r"unknown decision 'int3'"),
    "kind": (lambda plan, e: e[0].update(kind="mlp"), r"'kind' is gated_mlp in .*, and mlp in the plan"),
    "name": (lambda plan, e: e[0].update(name=f"{e[0]['name']}x"), r"no such subgraph; did you mean"),
    "node": (lambda plan, e: e[0].update(nodes=["gone", *e[0]["nodes"]]), r"has no node 'gone'"),  # type: ignore[misc]
    "fewer nodes": (lambda plan, e: e[0].update(nodes=e[0]["nodes"][1:]), r"'nodes' is \["),
    "twice": (lambda plan, e: e.append(e[0]), r"planned twice"),
    "missing key": (lambda plan, e: e[0].pop("nodes"), r"lacks nodes"),
    "unknown key": (lambda plan, e: e[0].update(speed="high"), r"unknown key 'speed'"),
    "no list": (lambda plan, e: plan.update(subgraphs="none"), r"'subgraphs' must be a list"),
    "nodes no list": (lambda plan, e: e[0].update(nodes="n0"), r"'nodes' must be a list"),
    "fewer inputs": (lambda plan, e: e[0].update(linear_inputs=[]), r"'linear_inputs' is .*, and \[\] in the plan"),
    "shapes": (lambda plan, e: e[0].update(shapes={}), r"'shapes' is .*, and \{\} in the plan"),
    "dtype": (lambda plan, e: e[0].update(dtype="float64"), r"'dtype' is float32 in .*, and float64 in the plan"),
    "output": (lambda plan, e: e[0].update(output="y"), r"'output' is m in .*, and y in the plan"),
    "op": (lambda plan, e: e[0].update(decision="fp8", op="FP8GatedMlp"), r"unknown op 'FP8GatedMlp'; one of NVFP4"),
    "shape no number": (lambda plan, e: e[0].update(shapes={"layers": "many"}), r"'shapes.layers' must be a number"),
}


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS.keys())
def test_wrong_edits(edit: Edit, message: str, source: SourceModel, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_all(source).save(path)
    content = yaml.safe_load(path.read_text())
    edit(content, content["subgraphs"])
    path.write_text("# edited\n" + yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(PlanError, match=rf"plan\.yaml, line \d+.*{message}"):
        Plan.load(path).check(source)


@pytest.mark.parametrize(("key", "text"), [("precision", "int3"), ("recipe", "spqr")])
def test_wrong_values_of_the_plan(key: str, text: str, source: SourceModel) -> None:
    plan = plan_all(source)
    setattr(plan, key, text)
    with pytest.raises(PlanError, match=rf"plan: .*unknown .*'{text}'"):
        plan.check(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [("  decision: keep", "'decision' is given twice"), ("  ? [decision]\n  : keep", "a key of .* must be text")],
    ids=["twice", "no text"],
)
def test_wrong_keys(line: str, message: str, source: SourceModel, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_all(source).save(path)
    path.write_text(path.read_text().replace("\n  kind:", f"\n{line}\n  kind:", 1))
    with pytest.raises(PlanError, match=rf"plan\.yaml, line \d+: .*{message}"):
        Plan.load(path)


def test_reasons_name_the_type_of_activations(loaded: Load) -> None:
    for dtype in ("float32", "float16"):
        source = loaded(mlp_model(spec(dtype=dtype))[0])
        assert f"W4A16, {dtype} activations: no calibration data" in plan_all(source).subgraphs[0].reason


def test_error_names_the_line(source: SourceModel, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_all(source).save(path)
    lines = path.read_text().splitlines()
    second = [i for i, line in enumerate(lines) if line.startswith("- name")][1]
    decision = next(i for i in range(second, len(lines)) if "decision" in lines[i])
    lines[decision] = "  decision: fp5"
    path.write_text("\n".join(lines))
    with pytest.raises(PlanError, match=rf"line {second + 1}: subgraph 'linear_0': unknown decision 'fp5'"):
        Plan.load(path).check(source)


def test_a_refused_subgraph_cannot_be_forced(loaded: Load) -> None:
    model, _ = mlp_model(spec(k=24))
    source = loaded(model)
    plan = plan_all(source)
    plan.subgraphs[0].decision = "nvfp4_w4a16"
    with pytest.raises(PlanError, match="cannot be nvfp4_w4a16: NVFP4 needs K to be a multiple of 16"):
        plan.check(source)


@pytest.mark.parametrize("decision", ["nvfp4_w4a4", "nvfp4_w4a16", "native_nvfp4", "trt_moe", "fp8", "bf16"])
def test_a_target_computes_what_it_can(decision: str, source: SourceModel) -> None:
    plan = plan_all(source)
    plan.subgraphs[0].decision = decision
    lack = "has no MoE layer for bare" if decision == "trt_moe" else f"bare does not compute {decision}"
    with pytest.raises(PlanError, match=f"it cannot be {decision}: .*{lack}"):
        plan.check(source, Capabilities("bare", bf16=False))
    if decision != "trt_moe":
        able = Capabilities("able", **{decision: True})
        plan.subgraphs = plan.subgraphs[:1]
        assert plan.check(source, able)


@pytest.mark.parametrize("content", ["", "[1, 2", "- a\n- b\n", "\x00", "just text"])
def test_not_a_plan(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"plan\.yaml"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["a: &a [x, x]\n", "a: &a [*a, *a]\n"])
def test_a_plan_that_stands_for_more_than_memory_holds(text: str, tmp_path: Path) -> None:
    """By aliases of lists of aliases."""
    lists = [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '*a'] * 10)}]\n" for n in range(12)]
    (tmp_path / "plan.yaml").write_text(text + "".join(lists))
    with pytest.raises(PlanError, match=r"it stands for \d{12,} values"):
        Plan.load(tmp_path / "plan.yaml")


def test_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "absent.yaml")


def test_reasons_tell_of_edits(source: SourceModel, tmp_path: Path) -> None:
    """And go on to, when the edited plan is saved; a reason of the user's own stays."""
    path = tmp_path / "plan.yaml"
    plan = plan_all(source)
    plan.save(path)
    content = yaml.safe_load(path.read_text())
    edited, explained = content["subgraphs"][:2]
    edited.update(decision="fp8")
    explained.update(decision="keep", reason="accuracy: the head stays")
    path.write_text(yaml.safe_dump(content))
    planned = plan.subgraphs[0]
    for _ in range(2):
        reasons = [entry.reason for entry in Plan.load(path).subgraphs]
        assert reasons == [f"edited; {planned.decision} was planned: {planned.reason}", "accuracy: the head stays"]
        Plan.load(path).save(path)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_reasons_of_fp8_without_data_know_the_plugin(dtype: str, loaded: Load) -> None:
    """Which finds its scales at run time, where Q/DQ nodes leave activations as they are."""
    source = loaded(mlp_model(spec(dtype=dtype))[0])
    h200 = Capabilities("h200", fp8=True, fp8_plugins=True)
    (entry,) = make_plan(source, find_subgraphs(source), h200, PlanOptions(precision="fp8")).subgraphs
    at_run_time = "FP8, no calibration data: activation scales computed at run time"
    assert bool(entry.lowering.is_plugin) == (dtype == "float16")
    assert (entry.reason == at_run_time) == bool(entry.lowering.is_plugin)


@pytest.mark.parametrize(("dtype", "half"), [("float32", "bf16"), ("float16", "keep")])
def test_16_bits_are_one_choice(dtype: str, half: str, loaded: Load) -> None:
    """Of a float32 model, not to keep it too."""
    (subgraph,) = find_subgraphs(loaded(mlp_model(spec(dtype=dtype))[0]))
    assert kind_of(subgraph).choices(subgraph, Decision.KEEP, EVERYTHING, "auto", "auto") == [
        "nvfp4_w4a4",
        "nvfp4_mixed",
        "nvfp4_w4a16",
        "fp8",
        half,
    ]


def test_entries_may_be_deleted(source: SourceModel) -> None:
    plan = plan_all(source, kinds=ALL_KINDS)
    del plan.subgraphs[0]
    assert [entry.kind for entry, _ in plan.check(source)] == ["linear"]


def test_every_decision_has_a_lowering() -> None:
    assert set(LOWERINGS) == set(Decision)


def test_reasons_have_codes(loaded: Load) -> None:
    source, narrow = loaded(mlp_model(spec(dtype="float16"))[0]), loaded(mlp_model(spec(k=24))[0])

    def code(model: SourceModel, **options: Any) -> str | None:
        return plan_all(model, kinds=options.pop("kinds", DEFAULT_KINDS), **options).subgraphs[0].reason_code

    assert code(source) == "no_calibration_data"
    assert code(source, calibrated=True) == "preferred"
    assert code(narrow) == "k_not_a_multiple_of_16"
    assert code(source, kinds=("moe",)) == "kind_not_selected"
    assert code(source, exclude=".") == "excluded"
    (entry,) = make_plan(source, find_subgraphs(source), Capabilities("none"), PlanOptions(precision="nvfp4")).subgraphs
    assert (entry.decision, entry.reason_code) == (Decision.KEEP, "unsupported_by_target")


@pytest.mark.parametrize(("tokens", "decision"), [(128, Decision.NVFP4_W4A16), (129, Decision.NVFP4_W4A4)])
def test_many_tokens_without_calibration(source: SourceModel, tokens: int, decision: Decision) -> None:
    """Where W4A16 would be slower than the model's own 16 bits, 4-bit activations are scaled at run time."""
    rows = {subgraph.name: tokens for subgraph in find_subgraphs(source)}
    entry = plan_all(source, "auto", tokens=rows).subgraphs[0]
    assert entry.decision == decision
    assert ("128 tokens, and --opt-shapes has 129" in entry.reason) == (decision == Decision.NVFP4_W4A4)
    assert plan_all(source, "nvfp4", tokens=rows).subgraphs[0].decision == Decision.NVFP4_W4A16
    assert plan_all(source, "auto").subgraphs[0].decision == Decision.NVFP4_W4A16
    assert plan_all(source, "auto", tokens=rows, calibrated=True).subgraphs[0].reason_code == "preferred"


def test_plans_of_before_there_were_codes(source: SourceModel, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_all(source).save(path)
    content = yaml.safe_load(path.read_text())
    assert all(entry.pop("reason_code") for entry in content["subgraphs"])
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    plan = Plan.load(path)
    assert [entry.reason_code for entry in plan.subgraphs] == [None] * len(content["subgraphs"])
    plan.check(source)
    content["subgraphs"][0]["decision"] = "keep"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    assert Plan.load(path).subgraphs[0].reason_code == "edited"
    content["subgraphs"][0]["reason_code"] = "because"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(PlanError, match="unknown reason_code 'because'"):
        Plan.load(path)


def test_plans_of_earlier_versions_have_other_names_of_decisions(source: SourceModel, tmp_path: Path) -> None:
    plan = plan_all(source)
    plan.subgraphs[0].decision = Decision.TRT_MOE
    plan.save(tmp_path / "new.yaml")
    older = (tmp_path / "new.yaml").read_text().replace("decision: trt_moe", "decision: native")
    (tmp_path / "older.yaml").write_text(older.replace("reason: 'trt_moe: ", "reason: 'native: "))
    assert "native: " in (tmp_path / "older.yaml").read_text()
    assert Plan.load(tmp_path / "older.yaml").subgraphs == Plan.load(tmp_path / "new.yaml").subgraphs
