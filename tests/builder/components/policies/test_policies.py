"""Policies in LeRobot's files: their parts compute what the library does, and what is wrong is said at once."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import trt_nvfp4.lerobot
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.components.devices.onnx_device import OnnxDevice
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.policies import bundled, script
from trt_nvfp4.builder.components.policies.checkpoint import processing_of
from trt_nvfp4.builder.components.policies.library import load_policy
from trt_nvfp4.builder.components.policies.policy import Policy
from trt_nvfp4.builder.components.policies.source import of_policy
from trt_nvfp4.builder.components.policies.taken_apart import NOISE, STEP_NOISE
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError, UsageError
from trt_nvfp4.builder.pipeline import parts_build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target

from . import small_lerobot as small

KINDS = {
    "act": {},
    "diffusion": {},
    "diffusion-ddim": {"noise_scheduler_type": "DDIM", "num_inference_steps": 5},
    "diffusion-x0": {"noise_scheduler_type": "DDIM", "num_inference_steps": 10, "prediction_type": "sample"},
    "pi0": {},
    "pi05": {},
    "smolvla": {},
}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    small.install(monkeypatch)


def exported(directory: Path, folder: Path) -> Path:
    source = of_policy(directory)
    folder.mkdir()
    parts = [part.export(source.name, folder) for part in source.parts]
    Manifest(source.task, parts, source.flows, source.settings, source.name).check().save(folder)
    return folder


def observed(rng: np.random.Generator) -> dict[str, Any]:
    """What a robot sees: bytes of two cameras, and joints in its own units."""
    images = {name: rng.integers(0, 256, (32, 48, 3), np.uint8) for name in (small.TOP, small.WRIST)}
    return {small.STATE: rng.standard_normal(small.JOINTS) * 3, **images, "task": [5, 17, 42, 8]}


def preprocessed(directory: Path, observation: dict[str, Any], sees_text: bool) -> dict[str, torch.Tensor]:
    """By LeRobot's arithmetic, in Torch."""
    statistics = load_file(directory / "pre.safetensors")
    found = {}
    for name in (small.STATE, small.TOP, small.WRIST):
        value = torch.as_tensor(observation[name])
        if value.ndim == 3:
            value = value.permute(2, 0, 1).float() / 255
        if value.ndim == 1 or not sees_text:
            value = (value - statistics[f"{name}.mean"]) / (statistics[f"{name}.std"] + 1e-8)
        found[name] = value.float()[None]
    if sees_text:
        found[small.TOKENS] = torch.tensor([[*observation["task"], *[0] * 8]])
        found[small.MASK] = torch.arange(12)[None] < 4
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_the_librarys(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """From what a robot sees to what it does, on an observation that the parts were not exported with."""
    of_type = kind.partition("-")[0]
    directory = small.write(tmp_path / "policy", of_type, **KINDS[kind])
    folder, observation = exported(directory, tmp_path / "parts"), observed(rng)
    batch = preprocessed(directory, observation, sees_text=of_type not in ("act", "diffusion"))
    library, noise = load_policy(directory), {NOISE: torch.randn(1, small.ROWS, small.PADDED)}
    with torch.no_grad(), torch.random.fork_rng([]):
        if of_type == "diffusion":
            noise[NOISE] = noise[NOISE][..., : small.JOINTS]
            twice = {name: torch.stack([value] * 2, 1) for name, value in batch.items()}
            twice["observation.images"] = torch.stack([twice.pop(small.TOP), twice.pop(small.WRIST)], 2)
            torch.manual_seed(7)
            chunk = library.diffusion.generate_actions(twice, noise[NOISE])
            torch.manual_seed(7)
            if kind == "diffusion":
                drawn = [torch.randn_like(noise[NOISE]) for _ in range(19)]  # none in the last of 20 steps
                noise[STEP_NOISE] = torch.stack([*drawn, torch.zeros_like(noise[NOISE])])
        else:
            chunk = library.predict_action_chunk(batch, **({} if kind == "act" else {"noise": noise[NOISE]}))
    ends = load_file(directory / "post.safetensors")
    low, high = ends["action.min"], ends["action.max"]
    expected = ((chunk[0] + 1) / 2 * (high - low) + low).numpy()

    given = {} if kind == "act" else {name: value.numpy() for name, value in noise.items()}
    with Pipeline(folder) as pipeline:
        policy = Policy(pipeline.manifest, pipeline.run)
        np.testing.assert_allclose(policy.predict_action_chunk(observation, given), expected, rtol=1e-4, atol=1e-4)
    for runner in ("onnxruntime", "torch"):
        loaded = trt_nvfp4.lerobot.load(directory, folder, runner=runner, seed=3)
        found = loaded.predict_action_chunk(batch, noise[NOISE] if given else None)
        assert found.shape == (1, *chunk.shape[1:])
        if kind != "diffusion":  # whose noise between steps is the policy's own
            torch.testing.assert_close(found, chunk, rtol=1e-4, atol=1e-4)
        loaded.close()


def test_chunks_are_used_up_and_observations_remembered(tmp_path: Path, rng: np.random.Generator) -> None:
    directory = small.write(tmp_path / "policy", "diffusion", noise_scheduler_type="DDIM", num_inference_steps=2)
    with Pipeline(exported(directory, tmp_path / "parts")) as pipeline:
        given: list[Any] = []

        def run(inputs: Any) -> Any:
            given.append(inputs)
            return pipeline.run(inputs)

        policy = Policy(pipeline.manifest, run, seed=0)
        seen = [observed(rng) for _ in range(5)]
        actions = [policy.select_action(observation) for observation in seen]
        assert [action.shape for action in actions] == [(small.JOINTS,)] * 5
        assert len(given) == 2  # four actions of the first chunk
        states = [policy.processing.prepared(observation)[small.STATE][0] for observation in seen]
        np.testing.assert_array_equal(given[0][small.STATE][0], [states[0], states[0]])
        np.testing.assert_array_equal(given[1][small.STATE][0], [states[3], states[4]])
        policy.reset(seed=0)
        np.testing.assert_array_equal(policy.select_action(seen[0]), actions[0])
        policy.reset(seed=1)
        assert not np.array_equal(policy.select_action(seen[0]), actions[0])


def _json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return changed


def _another_robot(directory: Path) -> None:
    statistics = load_file(directory / "pre.safetensors")
    save_file(
        {**statistics, "observation.state.mean": torch.zeros(7), "observation.state.std": torch.ones(7)},
        directory / "pre.safetensors",
    )


def _infinite(directory: Path) -> None:
    statistics = load_file(directory / "pre.safetensors")
    save_file(
        {**statistics, "observation.state.mean": torch.full((small.JOINTS,), torch.inf)}, directory / "pre.safetensors"
    )


def _constant(directory: Path) -> None:
    """A joint that never moved, and nothing that keeps its deviation from 0."""
    statistics = load_file(directory / "pre.safetensors")
    save_file({**statistics, "observation.state.std": torch.zeros(small.JOINTS)}, directory / "pre.safetensors")
    _json("policy_preprocessor.json", lambda c: c["steps"][1]["config"].update(eps=0))(directory)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "type": (
        _json("config.json", lambda c: c.update(type="vqbet")),
        r"config.json: the type 'vqbet' is not known",
    ),
    "weights": (lambda d: (d / "model.safetensors").unlink(), r"model.safetensors: is missing; download"),
    "processor": (lambda d: (d / "policy_preprocessor.json").unlink(), r"policy_preprocessor.json: is missing"),
    "statistics": (lambda d: (d / "pre.safetensors").unlink(), r"pre.safetensors: is missing"),
    "outside": (
        _json("policy_preprocessor.json", lambda c: c["steps"][1].update(state_file="../pre.safetensors")),
        r"\.\./pre.safetensors: is missing",
    ),
    "another robot": (_another_robot, r"statistics of observation.state have 7 values, and config.json says \[6\]"),
    "step": (
        _json("policy_preprocessor.json", lambda c: c["steps"].append({"registry_name": "crop"})),
        r"policy_preprocessor.json: the step 'crop' is not known here",
    ),
    "camera": (
        _json("config.json", lambda c: c["input_features"].pop(small.WRIST)),
        r"it normalizes observation.images.wrist, which config.json does not list",
    ),
    "broken": (
        _json("config.json", lambda c: c.update(n_action_steps=-1)),
        r"policy: its configuration and processor files cannot be read; download .*a size is -1",
    ),
    "entry": (_json("config.json", lambda c: c.pop("n_obs_steps")), r"statistics lack 'n_obs_steps'; download"),
    "statistic": (_infinite, r"policy: .* cannot be read; download .*expected to be finite"),
    "division": (_constant, r"policy: .* cannot be read; download .*divided by 0"),
    "joints": (_json("config.json", lambda c: c.update(adapt_to_pi_aloha=True)), r"adapt_to_pi_aloha is not supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_checkpoints(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says so, in one message, before it imports a library."""
    directory = small.write(tmp_path / "policy", "act")
    breaks, message = FAULTS[fault]
    breaks(directory)
    with pytest.raises(BuilderError, match=message) as failure:
        processing_of(directory)
    assert failure.value.exit_code == MODEL_AT_FAULT
    with pytest.raises(SystemExit) as end:
        app([str(directory), "-o", str(tmp_path / "out"), "--target", "rtx-blackwell"])
    assert end.value.code == MODEL_AT_FAULT
    assert not (tmp_path / "out").exists()


def test_weights_that_the_library_left_random(tmp_path: Path) -> None:
    directory = small.write(tmp_path / "policy", "act")
    weights = load_file(directory / "model.safetensors")
    del weights["mix.0.weight"]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(BuilderError, match=r"lacks 1 of the policy's weights, such as mix.0.weight"):
        load_policy(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({small.WRIST: None}, r"lacks the camera 'observation.images.wrist'; the policy sees 2"),
        (
            {"observation.images.side": np.zeros((32, 48, 3), np.uint8)},
            r"no camera 'observation.images.side'; its 2",
        ),
        ({small.TOP: np.zeros((48, 32, 3), np.uint8)}, r"top is float32 \[3, 48, 32\], expected \[3, 32, 48\]: resize"),
        (
            {small.STATE: np.zeros(7)},
            r"float64 \[7\], expected \[6\]: the policy was trained on another robot",
        ),
        ({"task": None}, r"lacks 'task'"),
    ],
)
def test_observations_that_do_not_fit(
    change: dict[str, Any], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    processing = processing_of(small.write(tmp_path / "policy", "pi05"))
    observation = {name: value for name, value in {**observed(rng), **change}.items() if value is not None}
    with pytest.raises(BuilderError, match=message) as failure:
        processing.prepared(observation)
    assert failure.value.exit_code == USAGE


def test_observations_in_other_files(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", state=np.zeros(300))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:400])
    given = Namespace(task_ids=None, task="go")
    assert script._observation(tmp_path / "whole.npz", given).keys() == {"state", "task"}
    for name in ("one.npy", "cut.npz", "none.npz"):
        with pytest.raises(UsageError, match=f"{name}: not a readable .npz file"):
            script._observation(tmp_path / name, given)


def test_the_state_in_the_text(tmp_path: Path) -> None:
    """pi0.5's: bins of 2/256 from -1 to 1."""
    text = processing_of(small.write(tmp_path / "policy", "pi05")).text
    assert text is not None
    prompt = text.prompt(" pick_up\nthe cube ", np.array([-1.0, 0.0, 0.999, 1.5, -1.5]))
    assert prompt == "Task: pick up the cube, State: 0 128 255 255 -1;\nAction: "


def test_engines_of_another_policy(tmp_path: Path) -> None:
    folder = exported(small.write(tmp_path / "one", "act"), tmp_path / "parts")
    with pytest.raises(BuilderError, match="was not built from"):
        trt_nvfp4.lerobot.load(small.write(tmp_path / "other", "act"), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["act", "diffusion", "pi05"])
def test_a_policy_becomes_engines(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    directory, out = small.write(tmp_path / "policy", kind), tmp_path / "out"
    report = parts_build.run(Request(directory, find_target("rtx-blackwell"), out))
    assert report.chain["export_error"] < 1e-4
    assert report.chain["cosine"] > 0.99
    assert list(report.joints) == [f"action {number}" for number in range(small.JOINTS)]
    assert all((out / f"{part}.engine").is_file() for part in report.parts)
    policy = trt_nvfp4.lerobot.load(directory, out, runner="onnxruntime")
    assert np.isfinite(policy.raw.select_action(observed(rng))).all()


# Runs a script of a bundle where only Python's own modules and NumPy can be imported.
_ALONE = """
import builtins, runpy, sys
original, allowed = builtins.__import__, {{*sys.stdlib_module_names, "numpy", "trt_nvfp4"}}
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {{}}).get("__name__", "").startswith("trt_nvfp4") and not level:
        if name.partition(".")[0] not in allowed:
            raise ImportError(name)
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.argv = ["run_policy.py", {observation!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_a_bundle_runs_with_numpy_alone(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = small.write(tmp_path / "policy", "act"), tmp_path / "thor"
    parts_build.run(Request(directory, find_target("thor"), bundle=out))
    seen = {name: value for name, value in observed(rng).items() if name != "task"}
    np.savez(tmp_path / "seen.npz", **seen)
    code = _ALONE.format(observation=str(tmp_path / "seen.npz"), script=str(out / bundled.SCRIPT))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == MODEL_AT_FAULT, ended.stderr
    assert "action/model.engine: no such engine; run build_engine.py first" in ended.stderr

    (out / "action" / "model.engine").touch()
    monkeypatch.setattr(script, "open_engines", lambda folder, manifest, files: OnnxDevice(folder, manifest))
    found = tmp_path / "actions.npy"
    monkeypatch.setattr(sys, "argv", ["", *[str(tmp_path / "seen.npz")] * 2, "--output", str(found)])
    assert script.main(out) == 0
    assert capsys.readouterr().out.count(" ms)") == 2
    expected = trt_nvfp4.lerobot.load(directory, out, runner="onnxruntime").raw.predict_action_chunk(seen)
    np.testing.assert_allclose(np.load(found), expected[:2], rtol=1e-5)
