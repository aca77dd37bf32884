"""What is refused before any work: lost files, options that fit nothing or would pass unheard."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
import yaml

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.model import onnx_file
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline import request_checks as checks
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan


def run(model: Path, target: str = "rtx-blackwell", **options: Any) -> Path:
    """Run the pipeline into `out/` beside the model, as far as the plan; returns where the plan is."""
    options = {"output": model.parent / "out" / "o.engine", "stop_after": "plan", **options}
    request = Request(model, find_target(target), **options)
    pipeline.run(request)
    return request.file(".plan.yaml")


def refusal(model: Path, *texts: str, code: int = errors.USAGE, **options: Any) -> None:
    """`run` fails with this code and these texts, and leaves every file as it was."""
    files = [file for file in model.parent.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    with pytest.raises(Exception, match=re.escape(texts[0])) as failure:
        run(model, **options)
    assert errors.exit_code(failure.value) == code, failure.value
    for text in texts:
        assert text in str(failure.value)
    assert {file: file.read_bytes() for file in files} == before


@pytest.fixture
def samples(tmp_path: Path, rng: np.random.Generator) -> Path:
    path = tmp_path / "samples.npz"
    np.savez(path, x=rng.standard_normal((5, 64)).astype(np.float16))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory that no export succeeds for, so that reaching it shows as the model's fault."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


def test_model_is_not_written_over(gated_mlps: Path, samples: Path) -> None:
    refusal(gated_mlps, "names the engine", output=gated_mlps)
    plain = gated_mlps.rename(gated_mlps.with_name("model"))
    refusal(plain, "model: would be written over", output=plain, stop_after=None)
    refusal(plain, "model.onnx.data: would be written over", output=plain.with_name("model.onnx.data"))
    refusal(plain, "model: would be written over", timing_cache=plain, stop_after=None)
    refusal(plain, "samples.npz: would be written over", output=samples, calib_data=samples, stop_after=None)
    link = plain.with_name("link.engine")
    link.symlink_to(plain)
    refusal(plain, "link.engine: would be written over", output=link)


def test_files_of_folders_that_are_read_are_not_written_over(gated_mlps: Path, directory: Path, samples: Path) -> None:
    folder = samples.parent / "samples"
    folder.mkdir()
    sample = samples.rename(folder / "0.npz")
    refusal(gated_mlps, f"{sample}: would be written over", calib_data=folder, output=sample)
    config = directory / "config.json"
    refusal(directory, f"{config}: would be written over", output=config)
    (weights := folder / "weights.safetensors").touch()
    refusal(gated_mlps, f"{weights}: would be written over", packed_weights=folder, output=weights)
    # What an earlier run left among them is no input.
    (engine := folder / "o.engine").touch()
    run(gated_mlps, calib_data=folder, output=engine)


def test_timing_cache_is_not_the_engine(gated_mlps: Path) -> None:
    engine = gated_mlps.parent / "o.engine"
    refusal(
        gated_mlps, "is the engine's file, too", output=engine, timing_cache=engine.parent / "out" / ".." / "o.engine"
    )


@pytest.mark.parametrize("bundle", [".", "", "/"])
def test_bundle_without_a_name(gated_mlps: Path, bundle: str) -> None:
    refusal(gated_mlps, "exists already; choose a new folder", output=None, stop_after=None, bundle=Path(bundle))


def test_a_plan_is_not_written_over(gated_mlps: Path) -> None:
    plan = run(gated_mlps)
    refusal(gated_mlps, "o.plan.yaml: would be written over", plan=plan, output=plan, stop_after=None)
    assert run(gated_mlps, plan=plan) == plan  # handed back to the run that wrote it


def test_external_data_called_as_the_rewritten_models(gated_mlps: Path) -> None:
    model = gated_mlps.with_name("o.onnx")
    onnx.save(
        onnx.load(gated_mlps), model, save_as_external_data=True, location="o.rewritten.onnx.data", size_threshold=0
    )
    output = gated_mlps.with_name("o.engine")
    refusal(model, "o.rewritten.onnx.data: would be written over", output=output, stop_after="rewrite")
    run(model, output=gated_mlps.with_name("p.engine"), stop_after="rewrite")


def test_every_stage_may_be_repeated(gated_mlps: Path) -> None:
    for _ in range(2):
        run(gated_mlps, stop_after="rewrite")


def test_an_export_replaces_exports_alone(directory: Path, gated_mlps: Path) -> None:
    output = gated_mlps.with_suffix(".engine")
    refusal(directory, "model.onnx: is not the export of an earlier run", output=output)
    earlier = onnx.load(gated_mlps)
    earlier.metadata_props.add(key=onnx_file.EXPORTED, value="model")
    onnx.save(earlier, gated_mlps)
    refusal(directory, "transformers cannot load this model", code=errors.MODEL_AT_FAULT, output=output)


@pytest.mark.parametrize("option", ["output", "timing_cache"])
def test_a_folder_where_a_file_is_to_be_written(gated_mlps: Path, tmp_path: Path, option: str) -> None:
    refusal(gated_mlps, f"{tmp_path}: is a folder", **{option: tmp_path})
    refusal(gated_mlps, "is a folder", **{option: Path(".")})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refusal(gated_mlps, f"{pipe}: is a device or a pipe", **{option: pipe})
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"packed_weights": Path("nix")}, "--set packed-weights=nix: no such file"),
        ({"calib_data": Path("nix")}, "--calib-data nix: no such file"),
        ({"calib_data": Path("nix.py:load")}, "--calib-data nix.py:load: no such file"),
        ({"plan": Path("nix")}, "--plan nix: no such file"),
        ({"recipe": "gptq"}, "recipe 'gptq' needs hessian"),
        ({"recipe": "awqq"}, "unknown part 'awqq'"),
        ({"kinds": ()}, "no kind of subgraph to replace"),
        ({"kinds": ("attention",)}, "unknown kind 'attention'"),
        ({"include": "["}, "--include ["),
    ],
    ids=str,
)
def test_before_an_export(directory: Path, options: dict[str, Any], text: str) -> None:
    refusal(directory, text, **options)
    assert not (directory.parent / "out").exists()


@pytest.mark.parametrize("place", ["model", "folder", "output"])
def test_a_name_that_is_not_utf8(tmp_path: Path, save_gated_mlps: Callable[..., Path], place: str) -> None:
    names = {"folder": "of the user", "model": "model", "output": "o", place: os.fsdecode(b"m\xf6d")}
    folder = tmp_path / names["folder"]
    folder.mkdir()
    model = save_gated_mlps(folder / "model.onnx", external=False)
    model = model.rename(folder / f"{names['model']}.onnx")
    refusal(model, "is not a name in UTF-8", r"m\udcf6d", output=tmp_path / f"{names['output']}.engine")


def test_a_utf8_name_in_a_locale_of_another_encoding(gated_mlps: Path) -> None:
    """Python has other characters for its bytes there, which ONNX Runtime and TensorRT do not take for the name."""
    model = gated_mlps.rename(gated_mlps.with_name("mödel.onnx"))
    command = [sys.executable, "-m", "trt_nvfp4.builder.cli.build_engine", model, "-o", model.with_name("o.engine")]
    command += ["--target", "rtx-blackwell", "--stop-after", "plan", "--json"]
    locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=locale, capture_output=True, text=True)
    assert done.returncode == errors.USAGE
    assert json.loads(done.stdout)["error"] == (
        f"{model}: is a name in UTF-8, which Python takes for ascii in this locale; set PYTHONUTF8=1, or a locale of "
        "UTF-8, such as LC_ALL=C.UTF-8"
    )


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        ("(int16[n, 64] x) => (float[n, 64] y)", "input 'x' is of type int16, which TensorRT does not have"),
        ("(string[n, 64] x) => (float[n, 64] y)", "input 'x' is of type string, which TensorRT does not have"),
        ("(float[n, 64] x) => (uint16[n, 64] y)", "output 'y' is of type uint16, which TensorRT does not have"),
        ("(seq(float[n, 64]) x) => (float[n, 64] y)", "input 'x' is of type sequence; an engine takes only tensors"),
    ],
)
def test_inputs_and_outputs_that_no_engine_has(tmp_path: Path, interface: str, text: str) -> None:
    cast = 4 if "=> (uint16" in interface else 1
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g {interface} {{ y = Cast<to = {cast}>(x) }}'
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    refusal(path, text, code=errors.MODEL_AT_FAULT)


def test_an_input_of_unknown_rank(gated_mlps: Path) -> None:
    model = onnx.load(gated_mlps, load_external_data=False)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, gated_mlps)
    refusal(gated_mlps, "input 'x' has no shape, not even a number of dimensions", code=errors.MODEL_AT_FAULT)


def test_a_model_from_a_pipe(tmp_path: Path) -> None:
    """It would be read a second time for ever."""
    os.mkfifo(tmp_path / "model.onnx")
    refusal(tmp_path / "model.onnx", "is a pipe or a device", code=errors.MODEL_AT_FAULT)


def test_calibration_without_samples(gated_mlps: Path, samples: Path) -> None:
    """It would leave no statistics, or an earlier run's."""
    run(gated_mlps, calib_data=samples, stop_after="calibrate")
    statistics = gated_mlps.parent / "out" / "o.statistics.json"
    for data in (None, statistics):
        refusal(gated_mlps, "--stop-after calibrate: nothing would be", calib_data=data, stop_after="calibrate")


def test_options_that_a_plan_leaves_without_effect(gated_mlps: Path) -> None:
    plan = run(gated_mlps)
    options = {"precision": "fp8", "moe": "trt_moe", "include": "nosuch"}
    refusal(gated_mlps, "o.plan.yaml has decided already", "--precision, --set moe, --include", plan=plan, **options)
    run(gated_mlps, plan=plan, recipe="max")
    assert Plan.load(plan).recipe == "max"
    # What is required is required of what these select.
    run(gated_mlps, plan=plan, include="gated_mlp_0", require="nvfp4")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_recipe_without_weights_to_quantize_by_it(gated_mlps: Path, precision: str) -> None:
    effect = "so that --recipe max would have no effect"
    refusal(gated_mlps, f"--precision {precision} has no NVFP4 weights, {effect}", precision=precision, recipe="max")
    plan = run(gated_mlps, precision=precision)
    refusal(gated_mlps, f"o.plan.yaml has no NVFP4 subgraph, {effect}", plan=plan, recipe="max")


def test_options_that_a_rewritten_model_leaves_without_effect(gated_mlps: Path, samples: Path) -> None:
    plan = run(gated_mlps, stop_after="rewrite")
    rewritten = plan.with_name("o.rewritten.onnx")
    options: dict[str, Any] = {"calib_data": samples, "packed_weights": samples, "recipe": "max", "exclude": "zzz"}
    unheard = "--exclude, --calib-data, --recipe, --stop-after, --set packed-weights"
    texts = ["o.rewritten.onnx has been rewritten already", unheard]
    refusal(rewritten, *texts, plan=plan, **options)


@pytest.mark.parametrize("options", [{"include": "nosuch"}, {"exclude": "."}], ids=str)
def test_nothing_left_to_replace(gated_mlps: Path, options: dict[str, str]) -> None:
    refusal(gated_mlps, "leave no subgraph to replace", "'gated_mlp_0'", **options)


@pytest.mark.parametrize(
    ("target", "decision", "text"),
    [
        ("ada", "nvfp4_w4a4", "ada does not compute nvfp4_w4a4"),
        ("h100", "native_nvfp4", "h100 does not compute native_nvfp4"),
        ("rtx-blackwell", "trt_moe", "TensorRT has no MoE layer for rtx-blackwell"),
    ],
)
def test_plan_edited_to_what_the_target_lacks(gated_mlps: Path, target: str, decision: str, text: str) -> None:
    path = run(gated_mlps, target)
    plan = yaml.safe_load(path.read_text())
    plan["subgraphs"][1]["decision"] = decision
    path.write_text(yaml.safe_dump(plan))
    refusal(gated_mlps, "o.plan.yaml, line", f"it cannot be {decision}: {text}", plan=path, target=target)


def test_weights_are_not_streamed_by_tensorrt_rtx(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before an export, where this machine would build the engine."""
    monkeypatch.setattr(type(find_target("ada")), "unsupported_here", lambda _: None)
    monkeypatch.setattr(checks, "choose_module", lambda *_: "tensorrt_rtx")
    refusal(directory, "--set weight-streaming=yes: tensorrt_rtx builds", weight_streaming=True, stop_after=None)
    streamed = Request(directory, find_target("ada"), output=tmp_path / "o.engine", weight_streaming=True)
    for elsewhere in ({"bundle": tmp_path / "b"}, {"stop_after": "plan"}, {"weight_streaming": False}):
        checks.check_streaming(attrs.evolve(streamed, **elsewhere))
    monkeypatch.setattr(checks, "choose_module", lambda *_: "tensorrt")
    checks.check_streaming(streamed)


def test_names_may_hold_dots(tmp_path: Path) -> None:
    target = find_target("ada")
    expected = {"Qwen2.5-7B": "Qwen2.5-7B", "Qwen2.5-7B.engine": "Qwen2.5-7B", "o.plan": "o", "o": "o"}
    for name, base in expected.items():
        request = Request(tmp_path / "m.onnx", target, output=tmp_path / name)
        assert request.file(".plan.yaml") == tmp_path / f"{base}.plan.yaml"


def test_a_plan_is_checked_before_an_export(gated_mlps: Path, directory: Path) -> None:
    plan = run(gated_mlps, "ada")
    written = yaml.safe_load(plan.read_text())
    for key, value, text in (
        ("decision", "native", "it cannot be trt_moe: TensorRT has no MoE layer for ada"),
        ("decision", "nvfp4_w4a4", "ada does not compute nvfp4_w4a4"),
        ("op", "Nothing", "unknown op 'Nothing'"),
    ):
        entry = {**written["subgraphs"][0], key: value}
        plan.write_text(yaml.safe_dump({**written, "subgraphs": [entry]}))
        refusal(directory, text, plan=plan, target="ada")
    plan.write_text(yaml.safe_dump(written))
    refusal(directory, "is a plan for ada, not for h100", plan=plan, target="h100")


def test_a_plan_without_subgraphs_is_a_warning(gated_mlps: Path) -> None:
    plan = run(gated_mlps)
    plan.write_text(yaml.safe_dump({**yaml.safe_load(plan.read_text()), "subgraphs": []}))
    run(gated_mlps, plan=plan)
    warnings = json.loads(plan.with_name("o.report.json").read_text())["warnings"]
    assert any("lists no subgraphs, so that nothing is replaced" in warning for warning in warnings)


@pytest.mark.parametrize("attention", ["auto", "tensorrt"])
def test_fp8_caches_are_checked_before_an_export(directory: Path, attention: str) -> None:
    why = "takes no FP8" if attention == "tensorrt" else "scales keys and values by calibration data"
    refusal(directory, why, kv_cache="fp8", attention=attention)
