"""The public functions: what commands do, without printing or exiting."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_nvfp4


def test_from_a_plan_to_a_bundle(tmp_path: Path, gated_mlps: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planned = trt_nvfp4.plan(gated_mlps, target="thor", output=tmp_path / "a.engine")
    assert planned.engine is None
    assert planned.files["plan"].is_file()
    assert [entry.decision for entry in planned.subgraphs]
    rewritten = trt_nvfp4.rewrite(gated_mlps, target="thor", output=tmp_path / "b.engine", plan=planned.files["plan"])
    assert rewritten.subgraphs == planned.subgraphs
    agreement = trt_nvfp4.compare(gated_mlps, rewritten.files["rewritten model"], min_cosine=0.9)
    assert agreement.samples == 4
    assert not agreement.failures
    built = trt_nvfp4.build(gated_mlps, target="thor", bundle=tmp_path / "bundle", plan=planned.files["plan"])
    assert built.bundle == tmp_path / "bundle"
    assert trt_nvfp4.inspect(tmp_path / "bundle")
    assert capfd.readouterr() == ("", "")


def test_the_roofline_is_predicted(gated_mlps: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = trt_nvfp4.bench(gated_mlps, target="b200", mode="roofline")
    assert found.mode == "roofline"
    assert {"nvfp4", "fp8", "bf16"} <= found.contestants.keys()
    assert all(times["predicted_us"] > 0 for times in found.contestants.values())
    assert capfd.readouterr() == ("", "")


def test_compare_takes_samples(gated_mlps: Path) -> None:
    samples = [{name: np.ones(shape, np.float16)} for name, shape in _inputs(gated_mlps).items()]
    assert trt_nvfp4.compare(gated_mlps, gated_mlps, samples, min_cosine=1 - 1e-6).failures == []


def test_failures_are_of_one_family(tmp_path: Path, gated_mlps: Path) -> None:
    with pytest.raises(trt_nvfp4.TrtNvfp4Error, match="h201") as unknown:
        trt_nvfp4.build(gated_mlps, target="h201", output=tmp_path / "a.engine")
    assert unknown.value.exit_code == 2
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(trt_nvfp4.TrtNvfp4Error, match=r"broken\.onnx") as model:
        trt_nvfp4.plan(broken, target="thor", output=tmp_path / "a.engine")
    assert model.value.exit_code == 3
    with pytest.raises(AttributeError, match="no attribute 'compile'"):
        trt_nvfp4.compile  # noqa: B018


def test_stages_are_those_of_the_functions(tmp_path: Path) -> None:
    given: dict[str, Any] = {"target": "thor", "output": tmp_path / "a.engine"}
    with pytest.raises(TypeError, match="plan stops after plan: leave stop_after='rewrite' out"):
        trt_nvfp4.plan(tmp_path / "m.onnx", stop_after="rewrite", **given)
    with pytest.raises(TypeError, match="rewrite stops after rewrite: leave stop_after='plan' out"):
        trt_nvfp4.rewrite(tmp_path / "m.onnx", stop_after="plan", **given)


def test_a_model_of_several_graphs_has_a_function_of_its_own(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TypeError, match="several graphs, which make several engines: call build_parts"):
        trt_nvfp4.build(tmp_path, target="thor", bundle=tmp_path / "bundle")


def test_no_prompts_are_none(tmp_path: Path) -> None:
    with pytest.raises(trt_nvfp4.TrtNvfp4Error, match="count 0: expected prompts"):
        trt_nvfp4.compare_steps(tmp_path / "a.onnx", tmp_path / "b.onnx", 2, count=0)


def _inputs(model: Path) -> dict[str, tuple[int, ...]]:
    from trt_nvfp4.calibration.samples.samples import input_specs

    return {name: tuple(d if isinstance(d, int) else 2 for d in s.shape) for name, s in input_specs(model).items()}
