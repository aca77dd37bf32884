"""compare-engine: what it prints and saves, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from command_lines import invoked
from onnx import parser

from onnx_models.graphs import save_model
from onnx_models.passes import rewritten_file
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.compare_engine import app
from trt_nvfp4.builder.components.manifest import FILE as PARTS
from trt_nvfp4.builder.cuda.driver import local_compute_capability
from trt_nvfp4.builder.parallel.manifest import FILE

TRAINED = Path(__file__).parents[2] / "trained_models"


@pytest.mark.skipif(local_compute_capability() is not None, reason="a GPU is here")
def test_engine_without_a_gpu_names_the_way_out(gated_mlps: Path) -> None:
    rewritten_file(gated_mlps)
    engine = gated_mlps.with_name("o.engine")
    engine.write_bytes(b"engine")
    invoked(
        app,
        [gated_mlps, engine],
        errors.UNAVAILABLE,
        "this machine has no such GPU",
        "o.rewritten.onnx computes the same without one",
    )


def test_command(gated_mlps: Path, tmp_path: Path) -> None:
    result = rewritten_file(gated_mlps)
    shown = invoked(app, [gated_mlps, result, "--json", "--kl"])
    found = json.loads(shown.stdout)
    assert found["reference"]["kind"] == "onnx"
    assert found["result"]["kind"] == "rewritten"
    assert found["samples"] == 4
    assert {row["kind"] for row in found["tensors"]} == {"output", "subgraph"}
    assert all(0 < row["kl"] < 0.1 and 0.9 < row["cosine"] < 1 for row in found["tensors"])

    table = invoked(app, [gated_mlps, result, "--samples", "1"])
    assert "gated_mlp_1" in table.stdout


def test_command_fails_below_a_threshold_and_saves_what_to_replay(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), str(rewritten_file(gated_mlps)), "--min-cosine", "0.99999"]
    worst = tmp_path / "worst"
    strict = invoked(app, [*arguments, "--json", "--save-worst", worst], errors.VERIFICATION_FAILED)
    found = json.loads(strict.stdout)
    assert len(found["failures"]) == 4
    assert "cosine >= 0.99999 is not met" in strict.stderr
    assert found["worst_samples"] == [str(file) for file in sorted(worst.iterdir())]

    replay = found["replay"].split()
    assert replay[0] == "compare-engine"
    again = invoked(app, [*replay[1:], "--json"])
    cosines = [
        [row["cosine"] for row in run["tensors"] if row["kind"] == "output"]
        for run in (found, json.loads(again.stdout))
    ]
    assert cosines[0] == cosines[1]

    invoked(app, [*arguments, "--save-worst", worst], errors.USAGE, "not empty")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-abs", "nan"], "--max-abs nan: expected a number from 0 to inf"),
        (["--max-rel", "-1"], "--max-rel -1.0: expected a number from 0 to inf"),
        (["--min-cosine", "1.5"], "--min-cosine 1.5: expected a number from -1 to 1"),
        (["--min-sqnr", "nan"], "--min-sqnr nan: expected a number"),
        (["--seed", "-1"], "--seed"),
        (["--save-worst", "model.onnx"], "--save-worst model.onnx: a file is there"),
        (["--plan", "o.plan.yaml"], "none of its replaced subgraphs can be seen in both"),
    ],
)
def test_command_refuses_what_cannot_be_met(
    gated_mlps: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten_file(gated_mlps)
    monkeypatch.chdir(gated_mlps.parent)
    invoked(app, ["model.onnx", "model.onnx", *options], errors.USAGE, message)


def test_command_says_a_failure_once(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m.onnx", "string[n]", "y = Identity(x)", x="string[n]")
    shown = CliRunner().invoke(app, [str(model), str(model), "--json", "--save-worst", str(tmp_path / "worst" / "of")])
    assert json.loads(shown.stdout)["exit_code"] == shown.exit_code == errors.USAGE
    assert shown.stderr.count("Received unexpected dtype") == 1
    assert list(tmp_path.iterdir()) == [model]


def test_command_takes_text_with_the_tokenizer_beside_the_model(tmp_path: Path) -> None:
    model = "g (int64[batch, sequence] input_ids) => (float[batch, sequence] y) { y = Cast<to = 1>(input_ids) }"
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {model}'), tmp_path / "m.onnx")
    text = tmp_path / "a.txt"
    text.write_text("Hello there.\n\nThe end.")
    arguments = [str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx"), "--data", str(text), "--json"]
    invoked(app, arguments, errors.USAGE, f"{tmp_path} has no tokenizer_config.json; put the tokenizer's files there")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TRAINED / "llama" / name).read_bytes())
    shown = invoked(app, arguments)
    assert json.loads(shown.stdout)["samples"] == 2


def test_command_saves_inputs_of_any_name(tmp_path: Path) -> None:
    """Also those that NumPy's savez has arguments of."""
    model = '<ir_version: 10, opset_import: ["": 21]> g (float[n, 8] file, float[n, 8] allow_pickle) => (float[n, 8] y)'
    onnx.save(parser.parse_model(f"{model} {{ y = Add(file, allow_pickle) }}"), tmp_path / "m.onnx")
    arguments = [str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx")]
    invoked(app, [*arguments, "--save-worst", tmp_path / "worst"])
    invoked(app, [*arguments, "--data", tmp_path / "worst"])


def test_command_says_that_inputs_which_do_not_fit_were_random(tmp_path: Path) -> None:
    """As of a decoder whose mask covers the cache and the new tokens, under a name that does not say so."""
    inputs = "float[1, sequence_length] x, float[1, past_length] past, float[1, mask_length] mask"
    body = "all = Concat<axis = 1>(past, x) y = Mul(all, mask)"
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float[1, m] y) {{ {body} }}'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    arguments = [str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx")]
    shown = invoked(app, arguments, errors.BUILD_FAILED)
    advice = "; the inputs were random, of the opt shapes: give samples with --data FILE|DIR, or shapes that fit"
    assert advice in shown.stderr

    invoked(app, [*arguments, "--shapes", "x:1x3,past:1x5,mask:1x8"])

    arrays = {name: np.ones((1, length), np.float32) for name, length in (("x", 3), ("past", 5), ("mask", 7))}
    np.savez(tmp_path / "s.npz", **arrays)
    given = invoked(app, [*arguments, "--data", tmp_path / "s.npz"], errors.BUILD_FAILED)
    assert "random" not in given.stderr


def test_command_takes_the_typical_shapes_of_the_report(gated_mlps: Path, tmp_path: Path) -> None:
    """Which the result was built for: it need not take the default ones. Those of other inputs do not matter."""
    result = rewritten_file(gated_mlps)
    profiles = {"x": [[1, 64], [7, 64], [9, 64]], "gone": [[1], [2], [3]]}
    gated_mlps.with_name("o.report.json").write_text(json.dumps({"profiles": profiles}))

    def tokens(*options: str) -> int:
        worst = tmp_path / f"worst{len(options)}"
        invoked(app, [gated_mlps, result, "--save-worst", worst, *options])
        with np.load(next(worst.iterdir())) as sample:
            return len(sample["x"])

    assert tokens() == 7
    assert tokens("--shapes", "x:3x64") == 3
    profiles["x"] = [[1, 65], [7, 65], [9, 65]]
    gated_mlps.with_name("o.report.json").write_text(json.dumps({"profiles": profiles}))
    assert tokens("--samples", "1", "--kl") == 128


def test_command_takes_given_samples_or_random_ones(gated_mlps: Path, tmp_path: Path) -> None:
    given = [str(gated_mlps), str(gated_mlps), "--data", str(tmp_path)]
    for options in (["--shapes", "x:1x64"], ["--samples", "4"], ["--seed", "0"]):
        invoked(app, [*given, *options], errors.USAGE, f"{options[0]} would make random samples instead")


def test_command_on_zeros_warns(gated_mlps: Path, tmp_path: Path) -> None:
    """Of what is 0 in every sample alone; an MLP without bias gives 0 for 0."""
    model, result, arguments = gated_mlps, rewritten_file(gated_mlps), ["--data", str(tmp_path / "data"), "--json"]
    (tmp_path / "data").mkdir()
    samples = np.zeros((2, 64), np.float16)
    np.save(tmp_path / "data" / "x.npy", samples)
    shown = invoked(app, [model, result, *arguments])
    for said in ("warning: every input is 0 in every sample", "warning: the reference is 0 in every sample", "mlp_1"):
        assert said in shown.stderr
    assert len(json.loads(shown.stdout)["warnings"]) == 2
    samples[1, 5] = 1
    np.save(tmp_path / "data" / "x.npy", samples)
    shown = CliRunner().invoke(app, [str(model), str(result), *arguments])
    assert "warning" not in shown.stderr
    assert json.loads(shown.stdout)["warnings"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-kl", "0.1"], "--max-kl 0.1: none of y can be logits"),
        (["--min-cosine", "0.9", "--check", "all"], "--check all: no replaced subgraph can be seen in both"),
        (["--check", "all"], "--check all: there is no threshold to meet"),
    ],
)
def test_what_would_judge_nothing(tmp_path: Path, options: list[str], message: str) -> None:
    """One number per sample, which is no logits, and no subgraph that could be replaced."""
    model = save_model(tmp_path / "m.onnx", "float[n, 1]", "i = Constant<value_ints = [1]>() y = ReduceMax(x, i)")
    invoked(app, [model, model, *options], errors.USAGE, message)
    invoked(app, [model, model, "--min-cosine", "0.9"])


@pytest.mark.parametrize(
    ("options", "unused"),
    [(["--min-cosine", "0.9", "--check", "all"], "--min-cosine, --check"), (["--shapes", "x:1"], "--shapes")],
)
def test_ranks_meet_no_thresholds_of_outputs(tmp_path: Path, options: list[str], unused: str) -> None:
    """They are compared token by token: what would be ignored is refused."""
    (tmp_path / FILE).write_text("{}")
    invoked(app, [tmp_path, tmp_path, *options], errors.USAGE, f"token by token: {unused} cannot apply")


def test_parts_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / PARTS).touch()
    invoked(app, [tmp_path, tmp_path], errors.USAGE, "the parts of a model; build-engine compared them")
