"""The mix of precisions: the knapsack against brute force, and budgets on models, measured again from the files."""

import errno
import itertools
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models import moe_spellings
from onnx_models.moe_spellings import Moe, MoeSpec
from trt_nvfp4.builder.accuracy import precision_search as precision_choice
from trt_nvfp4.builder.accuracy.budget import Budget, Score
from trt_nvfp4.builder.accuracy.precision_search import Trials
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError, VerificationError
from trt_nvfp4.builder.export import huggingface
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.calibration.samples.samples import input_specs, load_samples
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning import plan
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.weights import nvfp4 as nvfp4_weights


@pytest.fixture
def mlps(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> Path:
    return save_gated_mlps(tmp_path / "model.onnx", layers=3, hidden=32, intermediate=64)


@pytest.fixture
def samples(tmp_path: Path, rng: np.random.Generator) -> Path:
    folder = tmp_path / "samples"
    folder.mkdir()
    for index in range(8):
        np.savez(folder / f"{index}.npz", x=rng.standard_normal((6, 32)).astype(np.float16))
    return folder


def run(model: Path, samples: Path, budget: str, **options: Any) -> dict[str, Any]:
    options = {"target": find_target("thor"), "stop_after": "rewrite", "calib_data": samples, **options}
    request = pipeline.Request(
        model, output=model.parent / "out" / "o.engine", accuracy_budget=Budget.parse(budget), **options
    )
    report: dict[str, Any] = json.loads(pipeline.run(request).json())
    return report


def measured_again(report: dict[str, Any], model: Path, samples: Path) -> float:
    """The metric of the written model on the held-out samples."""
    original, rewritten = session(model), session(Path(report["files"]["rewritten model"]))
    score = Score(report["budget"]["metric"])
    for file in sorted(samples.glob("*.npz"))[1::4]:
        sample = dict(np.load(file))
        expected, actual = original.run(None, sample)[0], rewritten.run(None, sample)[0]
        score.add(sample, {"y": expected}, {"y": actual})
    return score.value


def test_budgets_are_met_and_tighter_ones_cost_more(mlps: Path, samples: Path) -> None:
    costs, decisions = [], []
    for limit in (10, 28, 45):
        report = run(mlps, samples, f"sqnr>={limit}")
        found = report["budget"]["achieved"]
        achieved = math.inf if found is None else found
        assert achieved >= limit
        for options in report["budget"]["subgraphs"].values():
            assert {o["decision"]: o["value"] for o in options}["keep"] is None, "infinite, which JSON has not"
        assert measured_again(report, mlps, samples) == pytest.approx(achieved)
        plan = Plan.load(report["files"]["plan"])
        rewritten = onnx.load(report["files"]["rewritten model"], load_external_data=False)
        plugins = [node.name for node in rewritten.graph.node if node.domain == "trt_nvfp4"]
        assert plugins == [e.name for e in plan.subgraphs if e.decision.startswith("nvfp4")]
        for entry in plan.subgraphs:
            if entry.kind == "gated_mlp":
                assert f"chosen for sqnr>={limit}" in entry.reason
                assert "fp8 " in entry.reason
        costs.append(report["budget"]["roofline_us"])
        decisions.append({entry.decision for entry in plan.subgraphs if entry.kind == "gated_mlp"})
    assert costs == sorted(costs)
    assert all(decision.startswith("nvfp4") for decision in decisions[0])
    assert costs[-1] > costs[0]


def test_residual_channels_are_chosen_by_subgraph(mlps: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where the budget allows it, the recipe's in as many subgraphs as it takes; the plan file says which."""
    monkeypatch.setattr(precision_choice, "_decisions", lambda *_: [Decision.NVFP4_W4A4])
    budget, chosen = 1.0, []
    for _ in range(2):
        report = run(mlps, samples, f"sqnr>={budget}", recipe="mse+residual:32")
        budget = report["budget"]["achieved"] + 0.3
        assert measured_again(report, mlps, samples) == pytest.approx(report["budget"]["achieved"])
        plan = Plan.load(report["files"]["plan"])
        rewritten = onnx.load(report["files"]["rewritten model"], load_external_data=False)
        attributes = {node.name: {a.name: a.i for a in node.attribute} for node in rewritten.graph.node}
        counts = []
        for entry in plan.subgraphs:
            options = {(o["decision"], o["residual_channels"]): o for o in report["budget"]["subgraphs"][entry.name]}
            assert list(options) == [("nvfp4_w4a4", 0), ("nvfp4_w4a4", 32)]
            without, with_some = options.values()
            assert with_some["loss"] < without["loss"]
            assert with_some["seconds"] > without["seconds"]
            assert attributes[entry.name]["residual_channels"] == entry.residual_channels
            counts.append(entry.residual_channels)
        chosen.append(counts)
    assert chosen[0] == [0, 0, 0]
    assert 32 in chosen[1]


def test_subgraphs_are_found_once(mlps: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many mixes are tried: finding probes routers and experts, and takes longer than a trial."""
    finds = []

    def count(module: ModuleType) -> None:
        original = module.find_subgraphs
        monkeypatch.setattr(module, "find_subgraphs", lambda model: (finds.append(model), original(model))[1])

    count(pipeline)
    count(plan)
    report = run(mlps, samples, "cosine>=0.9")
    assert len(finds) == 1
    assert sum(map(len, report["budget"]["subgraphs"].values())) > 3


def test_a_budget_out_of_reach_says_how_near_one_comes(mlps: Path, samples: Path) -> None:
    with pytest.raises(
        VerificationError, match=r"no mix .*'sqnr>=60' with --require nvfp4.* nearest comes to sqnr \d"
    ) as e:
        run(mlps, samples, "sqnr>=60", require="nvfp4")
    near = float(str(e.value).rsplit(" ", 1)[1])
    achieved = run(mlps, samples, f"sqnr>={near - 0.01:.2f}", require="nvfp4")["budget"]["achieved"]
    assert achieved == pytest.approx(near, rel=1e-5)


def test_what_is_required_at_least_may_be_less(mlps: Path, samples: Path) -> None:
    """--require fp8 leaves NVFP4 to choose, and no 16 bits."""
    budget = run(mlps, samples, "cosine>=0.5", require="fp8", stop_after="plan")["budget"]
    for options in budget["subgraphs"].values():
        assert [option["decision"] for option in options] == ["nvfp4_w4a4", "nvfp4_mixed", "nvfp4_w4a16", "fp8"]


def test_what_is_not_a_number_is_not_the_nearest(mlps: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes, score_of = itertools.chain([math.nan], itertools.repeat(0.5)), Trials.score

    def score(trials: Trials, entries: Sequence[PlannedSubgraph], recorded: Any) -> Any:
        mixed = len(entries) > 1
        return SimpleNamespace(value=next(mixes), worst_output="") if mixed else score_of(trials, entries, recorded)

    monkeypatch.setattr(Trials, "score", score)
    with pytest.raises(BuilderError, match=r"nearest comes to cosine 0\.5$"):
        run(mlps, samples, "cosine>=0.9")


def with_outputs(model: Path) -> None:
    """Adds a gate of the output, saturated and so less exact by some measures, and the indices of the ten greatest."""
    proto = onnx.load(model)
    (y,) = (output.name for output in proto.graph.output)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([10]), "ten"))
    proto.graph.node.extend(
        [
            onnx.helper.make_node("Sigmoid", [y], ["gate"]),
            onnx.helper.make_node("TopK", [y, "ten"], ["greatest", "indices"]),
        ]
    )
    for name, kind in (("gate", onnx.TensorProto.FLOAT16), ("indices", onnx.TensorProto.INT64)):
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    onnx.save(proto, model)


def test_indices_do_not_count_and_the_worst_output_is_named(mlps: Path, samples: Path) -> None:
    """As of a detector, whose indices move with errors that its scores hardly show."""
    before = run(mlps, samples, "cosine>=0.9")
    with_outputs(mlps)
    report = run(mlps, samples, "cosine>=0.9")
    assert report["warnings"] == ["--accuracy-budget counts only floating-point outputs, not indices"]
    assert report["budget"]["achieved"] == before["budget"]["achieved"]
    assert report["budget"]["worst_output"] == "y2"
    assert before["budget"]["worst_output"] == ""
    (reason,) = {entry["reason"] for entry in report["subgraphs"] if entry["name"] == "gated_mlp_0"}
    assert " of output y2 (" in reason
    assert "of output" not in str(before["subgraphs"])
    with pytest.raises(BuilderError, match=r"nearest comes to cosine 0\.\d+ of output y2$"):
        run(mlps, samples, "cosine>=0.99999", require="nvfp4")


def test_a_full_disk_for_temporary_files_is_named(mlps: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(file: Path, mode: str = "r", **options: Any) -> zipfile.ZipFile:
        if mode != "r":
            raise OSError(errno.ENOSPC, "No space left on device")
        return zipfile.ZipFile(file, mode, **options)

    monkeypatch.setattr("trt_nvfp4.calibration.samples.samples.zipfile", SimpleNamespace(ZipFile=no_space))
    out = mlps.parent / "out"  # not /tmp, which may be memory
    with pytest.raises(OSError, match=rf"No space left on device: '{out}/\.trt-nvfp4-\w+/choosing-0\.npz'"):
        run(mlps, samples, "cosine>=0.9")
    assert not any(file.is_dir() for file in out.iterdir())


def test_a_budget_that_asks_for_the_original_keeps_it(mlps: Path, samples: Path) -> None:
    report = run(mlps, samples, "cosine>=1", stop_after="plan")
    assert report["budget"]["achieved"] == 1
    assert {entry["decision"] for entry in report["subgraphs"]} == {"keep"}
    # Of the original there is no error, and JSON knows no infinity.
    assert run(mlps, samples, "sqnr>=300", stop_after="plan")["budget"]["achieved"] is None


def test_an_original_that_is_not_finite(mlps: Path, samples: Path) -> None:
    """Nothing compares with NaN: the model is named, not the budget."""
    model = onnx.load(mlps)
    model.graph.node.append(onnx.helper.make_node("Sqrt", ["x"], ["root"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("root", onnx.TensorProto.FLOAT16, None))
    onnx.save(model, mlps)
    with pytest.raises(ModelFaultError, match=r"choosing sample 0 makes the original's own output root NaN"):
        run(mlps, samples, "cosine>=0.5")


def test_outputs_that_are_all_zero_meet_no_budget(mlps: Path, samples: Path, tmp_path: Path) -> None:
    """Whatever stands in the mix gives them: nothing would have been verified."""
    shape = np.load(next(samples.glob("*.npz")))["x"].shape
    np.savez(tmp_path / "zeros.npz", x=np.zeros(shape, np.float16))
    with pytest.raises(UsageError, match=r"original are 0 in every held-out sample.*--accuracy-data"):
        run(mlps, samples, "cosine>=0.5", accuracy_data=tmp_path / "zeros.npz")


def test_float32_goes_no_further_than_16_bits(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> None:
    model = save_gated_mlps(tmp_path / "wide.onnx", layers=1, hidden=32, elem_type=onnx.TensorProto.FLOAT)
    rng = np.random.default_rng(5)
    data = tmp_path / "x"
    data.mkdir()
    np.save(data / "x.npy", rng.standard_normal((8, 32)).astype(np.float32))
    report = run(model, data, "cosine>=0.9999")
    assert report["network"]["type"] == "bf16"
    assert {entry["decision"] for entry in report["subgraphs"] if entry["kind"] == "gated_mlp"} <= {"fp8", "keep"}


def test_statistics_of_every_precision_are_collected(mlps: Path, samples: Path) -> None:
    """The recipe takes one Hessian for W4A4 and another for W4A16."""
    report = run(mlps, samples, "cosine>=0.9", recipe="local-hessian+gptq+quantized-inputs")
    assert report["budget"]["achieved"] >= 0.9


def test_statistics_of_precisions_that_cannot_be_chosen_are_not_collected(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], samples: Path
) -> None:
    """72 channels are no blocks of 16, whose statistics the recipe asks for."""
    model = save_gated_mlps(tmp_path / "model.onnx", hidden=32, intermediate=72)
    report = run(model, samples, "cosine>=0.9", recipe="local-hessian+gptq")
    assert {s["decision"] for s in report["subgraphs"]} <= {"fp8", "keep"}


def test_separate_held_out_data(mlps: Path, samples: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    for index in range(2):
        np.savez(held_out / f"{index}.npz", x=rng.standard_normal((6, 32)).astype(np.float16))
    report = run(mlps, samples, "cosine>=0.9", accuracy_data=held_out)
    assert (report["budget"]["held_out_samples"], report["budget"]["choosing_samples"]) == (2, 8)


def test_bad_requests(mlps: Path, samples: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "0.npz").write_bytes((samples / "0.npz").read_bytes())
    cases = [
        ({"samples": one}, "at least two samples"),
        ({"plan": tmp_path / "p.yaml"}, "--plan and --accuracy-budget both decide"),
        ({"calib_data": None}, "add --calib-data"),
        ({"calib_data": tmp_path / "x.statistics.json"}, "needs input samples"),
        ({"budget": "perplexity<=20"}, "needs a language model"),
        ({"precision": "native-nvfp4"}, "ONNX Runtime, which has no FP4"),
    ]
    for changed, says in cases:
        arguments: dict[str, Any] = {"samples": samples, "budget": "cosine>=0.9", **changed}
        with pytest.raises(UsageError, match=says):
            run(mlps, **arguments)


def test_fp8_is_the_plugin_where_the_target_has_it(mlps: Path, samples: Path) -> None:
    report = run(mlps, samples, "sqnr>=15", target=find_target("h200"), precision="fp8")
    entries = [e for e in Plan.load(report["files"]["plan"]).subgraphs if e.kind == "gated_mlp"]
    assert {(entry.decision, entry.op) for entry in entries} == {("fp8", "FP8GatedMLP")}
    rewritten = onnx.load(report["files"]["rewritten model"], load_external_data=False)
    assert [node.op_type for node in rewritten.graph.node if node.domain == "trt_nvfp4"] == ["FP8GatedMLP"] * 3
    assert measured_again(report, mlps, samples) == pytest.approx(report["budget"]["achieved"])
    report = run(mlps, samples, "sqnr>=15", target=find_target("b200"), precision="fp8", stop_after="plan")
    assert {entry.op for entry in Plan.load(report["files"]["plan"]).subgraphs} == {""}


@pytest.mark.parametrize(("recipe", "times"), [(None, 2), ("gptq+quantized-inputs", 3)])
def test_each_subgraph_is_quantized_once(
    mlps: Path, samples: Path, recipe: str | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three MLPs, two matrices each, for W4A4 and W4A16 together unless their weights differ, and for both in one MLP,
    which has other nodes, however many mixes are verified."""
    made = []
    original = nvfp4_weights.WeightQuantizer

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(nvfp4_weights, "WeightQuantizer", counted)
    report = run(mlps, samples, "sqnr>=24", stop_after="plan", recipe=recipe)
    assert len(report["budget"]["tried"]) > 1
    assert len(made) == 3 * 2 * times


@pytest.fixture
def unrolled(tmp_path: Path, rng: np.random.Generator) -> Path:
    """a = mlp0(tanh(x)), b = mlp1(tanh(a)), c = mlp0(tanh(b)), d = mlp0(tanh(c))."""
    text = ""
    for index, (mlp, x, y) in enumerate([(0, "x", "a"), (1, "a", "b"), (0, "b", "c"), (0, "c", "d")]):
        text += f"""t{index} = Tanh({x})  g{index} = MatMul(t{index}, gate{mlp})  s{index} = Sigmoid(g{index})
            m{index} = Mul(g{index}, s{index})  u{index} = MatMul(t{index}, up{mlp})  h{index} = Mul(m{index}, u{index})
            {y} = MatMul(h{index}, down{mlp})\n"""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float16[tokens, 32] x) => (float16[tokens, 32] d) {{ {text} }}"""
    )
    for mlp in range(2):
        for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            weight = (rng.standard_normal(shape) * (0.5, 0.1)[mlp]).astype(np.float16)
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"{name}{mlp}"))
    onnx.save(model, tmp_path / "unrolled.onnx")
    return tmp_path / "unrolled.onnx"


def test_calls_of_the_same_weights_get_one_precision(unrolled: Path, samples: Path) -> None:
    """Every mix, whatever its budget, has one for the three; they are measured together and written once."""
    decided = set()
    limit = 5.0
    # Each budget asks for a little more than the mix before it reached, so that none between two is passed over; the
    # last keeps all.
    while limit < math.inf:
        report = run(unrolled, samples, f"sqnr>={limit}")
        first, other, *calls = (entry for entry in report["subgraphs"] if entry["kind"] == "gated_mlp")
        assert {first["decision"]} == {entry["decision"] for entry in calls}
        assert "; with 2 of the same weights, sqnr" in first["reason"]
        assert "; by itself, sqnr" in other["reason"]
        assert measured_again(report, unrolled, samples) == pytest.approx(report["budget"]["achieved"] or math.inf)
        options = report["budget"]["subgraphs"]
        chosen = {
            e["name"]: next(o for o in options[e["name"]] if o["decision"] == e["decision"])
            for e in (first, other, *calls)
        }
        assert report["budget"]["roofline_us"] == pytest.approx(sum(o["seconds"] for o in chosen.values()) * 1e6)
        loss = chosen[first["name"]]["loss"] + chosen[other["name"]]["loss"]
        assert report["budget"]["predicted_loss"] == pytest.approx(loss)
        decided.add((first["decision"], other["decision"]))
        limit = (report["budget"]["achieved"] or math.inf) + 0.1
    assert any(first != other for first, other in decided), "groups of their own"


@pytest.fixture
def moe(tmp_path: Path, seed: int) -> Path:
    path = tmp_path / "model.onnx"
    moe_spellings.export(Moe(MoeSpec("gathered"), seed).half(), path, seed)
    return path


def test_moe_blocks_are_chosen_for_too(moe: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    width = input_specs(moe)["x"].shape[-1]
    # The same four times: FP8's static scales would clip what a held-out sample has beyond the others, and a mixture's
    # activations have long tails.
    x = rng.standard_normal((2, 16, int(width))).astype(np.float16)
    for index in range(4):
        np.savez(folder / f"{index}.npz", x=x)

    def chosen(budget: str, **options: Any) -> tuple[str, dict[str, Any]]:
        report = run(moe, folder, budget, kinds=("moe",), max_shapes={"x": (2, 16, int(width))}, **options)
        (entry,) = [entry for entry in report["subgraphs"] if entry["kind"] == "moe"]
        return entry["decision"], report["budget"]

    loose, numbers = chosen("cosine>=0.5")
    assert loose.startswith("nvfp4")
    tight, dear = chosen("cosine>=0.9999999")
    assert tight == "keep", "FP8MoE has no kernels for this target"
    assert dear["roofline_us"] > numbers["roofline_us"]
    hopper = find_target("h200")
    (options,) = chosen("cosine>=0.5", target=hopper)[1]["subgraphs"].values()
    values = {option["op"]: option["value"] for option in options}
    between = (values["NVFP4MoE"] + values["FP8MoE"]) / 2
    assert chosen(f"cosine>={between}", target=hopper)[0] == "fp8"
    assert chosen("cosine>=0.9999999", moe="trt_moe")[0] == "trt_moe", "TensorRT's own layer stands for 16 bits"
    with pytest.raises(BuilderError, match=r"no mix of precisions meets .* with --require nvfp4"):
        chosen("cosine>=0.9999999", require="nvfp4")


@pytest.mark.slow
def test_five_budgets_on_a_trained_model(tmp_path: Path) -> None:
    """Perplexity of held-out text, from what NVFP4 everywhere comes to down to what nothing does."""
    pytest.importorskip("transformers")
    fixtures = Path(__file__).resolve().parents[2] / "trained_models"
    text = (fixtures / "text" / "train.txt").read_text()
    (tmp_path / "calibration.txt").write_text(text[:1500])
    (tmp_path / "held-out.txt").write_text((fixtures / "text" / "held_out.txt").read_text()[:1500])
    exported = huggingface.export(fixtures / "llama", tmp_path / "llama.onnx")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((fixtures / "llama" / file).read_bytes())
    options = {
        "accuracy_data": tmp_path / "held-out.txt",
        "include": r"layers\.[03]\.mlp",
        "stop_after": "plan",
        "recipe": "mse",
    }

    def chosen(limit: float) -> dict[str, Any]:
        numbers: dict[str, Any] = run(exported, tmp_path / "calibration.txt", f"perplexity<={limit:.6g}", **options)[
            "budget"
        ]
        return numbers

    loosest = chosen(1000)
    found = [loosest]
    # From NVFP4's own perplexity to that of the original, which is what the most accurate mix comes to.
    original = perplexity(exported, fixtures / "llama", tmp_path / "held-out.txt")
    for share in (1.0, 0.5, 0.1):
        limit = original + share * (loosest["achieved"] - original) + 1e-4
        found.append(chosen(limit))
        assert found[-1]["achieved"] <= limit
    costs = [numbers["roofline_us"] for numbers in found]
    assert costs == sorted(costs)
    with pytest.raises(VerificationError, match="the nearest comes to perplexity"):
        chosen(original * 0.9)


def perplexity(model: Path, tokenizer: Path, text: Path) -> float:
    runner, score = session(model), Score("perplexity")
    for sample in load_samples(text, input_specs(model), tokenizer):
        (logits,) = runner.run(None, dict(sample))
        score.add(sample, {"logits": logits}, {"logits": logits})
    return score.value
