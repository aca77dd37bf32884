"""Options are written once: what the command takes, the API takes, under the same name and with the same refusals."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from command_lines import invoked

import trt_nvfp4
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.cli.reference import COMMANDS
from trt_nvfp4.builder.options import entries_of
from trt_nvfp4.builder.pipeline.build_options import BuildOptions
from trt_nvfp4.builder.pipeline.request import Request, with_needs_of_budget
from trt_nvfp4.calibration import recipes
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS

MODEL = {"model": "m.onnx", "target": "ada", "output": "o.engine"}
SETTINGS = [entry for entry in entries_of(BuildOptions) if entry.option.is_setting]


def failure(*arguments: str) -> str:
    result = invoked(app, ["m.onnx", "--target", "ada", "-o", "o.engine", "--json", *arguments], errors.USAGE)
    return str(json.loads(result.stdout)["error"])


def test_help_names_every_recipe() -> None:
    (option,) = (entry.option for entry in entries_of(BuildOptions) if entry.name == "recipe")
    assert set(recipes.NAMES) <= set(re.findall(r"[a-z][a-z-]*(?::\d+)?", option.help))


@pytest.mark.parametrize("entry", SETTINGS, ids=lambda entry: entry.name)
def test_an_option_that_became_a_setting_names_it(entry: Any) -> None:
    assert failure(f"--{entry.spelling}").startswith(
        f"--{entry.spelling} is a setting now: write --set {entry.spelling}="
    )


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (["--attention", "native"], {"attention": "native"}, "--attention native: is now called tensorrt"),
        (["--set", "moe=native"], {"moe": "native"}, "--set moe=native: is now called trt_moe"),
        (["--precision", "fp4"], {"precision": "fp4"}, "--precision fp4: expected auto, nvfp4, native-nvfp4"),
        (["--min-shapes", "x"], {"min_shapes": "x"}, "--min-shapes 'x': expected NAME:AxBxC"),
        (["--set", "all-logits=on"], {"all_logits": "on"}, "--set all-logits=on: expected yes or no"),
        (["--set", "accuracy-samples=-1"], {"accuracy_samples": -1}, "--set accuracy-samples=-1: expected 0 or more"),
        (["--accuracy-budget", "cosine"], {"accuracy_budget": "cosine"}, "--accuracy-budget 'cosine': expected one of"),
        (["--target", "h201"], {"target": "h201"}, "h201"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_value_is_refused_alike(arguments: list[str], options: dict[str, Any], text: str) -> None:
    assert text in failure(*arguments)
    with pytest.raises(trt_nvfp4.TrtNvfp4Error) as refused:
        trt_nvfp4.build(**{**MODEL, **options})
    assert text in str(refused.value)
    assert refused.value.exit_code == errors.USAGE


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("moee=plugin", "--set moee=plugin: no setting 'moee'; known: accuracy-samples, all-kernels"),
        ("surgery", "--set surgery: expected surgery=SCRIPT.py:FUNCTION"),
        ("accuracy-samples=x", "--set accuracy-samples=x: expected a whole number"),
    ],
)
def test_a_setting_that_is_not_one(setting: str, text: str) -> None:
    assert text in failure("--set", setting)
    assert "moe is given twice" in failure("--set", "moe=plugin", "--set", "moe=trt_moe")


def test_values_are_taken_as_the_command_takes_them() -> None:
    given = BuildOptions(
        "m.onnx", "ada", kinds="all, decoder", min_shapes="x:1x16,y:2", opt_shapes={"x": [1, 16]}, embed_plugins="no"
    )
    assert given.model == Path("m.onnx")
    assert given.kinds == (*ALL_KINDS, "decoder")
    assert BuildOptions("m", "ada", kinds="mlp").kinds == ("mlp",) == BuildOptions("m", "ada", kinds=["mlp"]).kinds
    assert given.min_shapes == {"x": (1, 16), "y": (2,)}
    assert given.opt_shapes == {"x": (1, 16)}
    assert given.embed_plugins is False
    assert attrs.evolve(given, accuracy_budget="kl<=1") == attrs.evolve(attrs.evolve(given, accuracy_budget="kl<=1"))


def test_perplexity_takes_the_logits_of_every_token(tmp_path: Path) -> None:
    for budget, expected in (("perplexity<=9", True), ("kl<=1", False), (None, False)):
        request = Request(tmp_path, "ada", accuracy_budget=budget)
        assert with_needs_of_budget(request).all_logits == expected
    onnx = Request(tmp_path / "m.onnx", "ada", accuracy_budget="perplexity<=9")
    assert with_needs_of_budget(onnx) == onnx, "it has the outputs that it has"


@pytest.mark.parametrize("name", ["build", "build_parts", "plan", "rewrite"])
def test_the_signatures_are_the_options(name: str) -> None:
    parameters = inspect.signature(getattr(trt_nvfp4, name)).parameters
    assert parameters.keys() == {entry.name for entry in entries_of(BuildOptions)} | {"progress"}
    with pytest.raises(TypeError, match="precison"):
        getattr(trt_nvfp4, name)(**MODEL, precison="fp8")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_and_lost_models_need_nothing_heavy(command: Any, tmp_path: Path) -> None:
    """Without torch, NumPy and ONNX, whose imports take seconds."""
    module = f"trt_nvfp4.builder.cli.{command.name.replace('-', '_')}"
    lost = ["nix.onnx"] * (2 if command.name == "compare-engine" else 1)
    needed = ["--target", "ada", "-o", "o"] if command.name == "build-engine" else []
    missing = [([*lost, *needed], errors.MODEL_AT_FAULT)] if command.name != "doctor" else []
    for arguments, code in (["--help"], 0), *missing:
        script = f"""
import sys
from {module} import app
try:
    app({arguments!r})
except SystemExit as ended:
    assert ended.code == {code}, ended.code
print(sorted({{"torch", "numpy", "onnx", "onnxruntime", "transformers"}} & sys.modules.keys()), file=sys.stderr)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]"


def test_a_model_of_the_hub_is_named_by_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path))
    for command in COMMANDS:
        if command.name == "doctor":
            continue
        models = ["Qwen/Qwen3-0.6B"] * (2 if command.name == "compare-engine" else 1)
        needed = ["--target", "ada", "-o", str(tmp_path / "o")] if command.name == "build-engine" else []
        invoked(command, [*models, *needed], errors.MODEL_AT_FAULT, "hf download Qwen/Qwen3-0.6B --local-dir DIR")
