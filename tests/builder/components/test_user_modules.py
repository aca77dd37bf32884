"""Parts from a Python file: a robot policy, and what users get wrong."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trt_nvfp4
from trt_nvfp4.builder.components.check import computed_by, expected_of
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.user_modules import of_file
from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.pipeline import parts_build as build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.inspected import tables
from trt_nvfp4.builder.report.inspection import inspect
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.metrics import relative_error

POLICY = Path(__file__).parents[3] / "examples" / "vla" / "policy.py"


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"vla_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def policy() -> Any:
    return load(POLICY)


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_actions_are_the_policys(policy: Any, unroll: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the modules called one by one, on fresh observations."""
    monkeypatch.setenv("VLA_STEPS", "3")
    monkeypatch.setenv("VLA_UNROLL", str(int(unroll)))
    source = of_file(Path(f"{POLICY}:components"))
    manifest = Manifest(
        source.task, [p.export(source.name, tmp_path) for p in source.parts], source.flows, source.settings, "policy"
    ).check()
    manifest.save(tmp_path)
    expected = expected_of(source.example)
    found = computed_by(tmp_path, manifest, source.example, expected)
    assert relative_error(found=found, expected=expected) < 1e-4
    given = {name: torch.randn(array.shape) for name, array in source.example.inputs.items() if array.dtype.kind == "f"}
    given["instruction"] = torch.randint(0, 100, source.example.inputs["instruction"].shape)
    vision, prefix, action = (part.module.module for part in source.parts)
    step = action.step if unroll else action
    actions = given["actions"]
    with torch.no_grad():
        cache = prefix(vision(given["pixels"]), given["instruction"])
        for number in range(3):
            velocity = step.velocity(actions, torch.tensor([1 - number / 3]), given["state"], cache)
            actions = actions - velocity / 3
    with Pipeline(tmp_path) as pipeline:
        found = pipeline.run({name: tensor.numpy() for name, tensor in given.items()})
        with pytest.raises(BuilderError, match=r"the input state is missing: expected float32 \[1, 8\]"):
            pipeline.run({name: tensor.numpy() for name, tensor in given.items() if name != "state"})
        with pytest.raises(BuilderError, match="call run"):
            pipeline.generate([[1]])
    with Pipeline(tmp_path, runner="torch") as pipeline:
        in_torch = pipeline.run({name: tensor.numpy() for name, tensor in given.items()})
    for outputs in (found, in_torch):
        np.testing.assert_allclose(outputs["action.next_actions"], actions.numpy(), rtol=1e-4, atol=1e-4)
    with pytest.raises(BuilderError, match=r"--runner tensorrt: .* the part 'vision' has no engine"):
        Pipeline(tmp_path, runner="tensorrt")


FILE = """
import torch
from trt_nvfp4 import Component, Loop
class Halved(torch.nn.Module):
    def forward(self, x):
        return x.half()
class Longer(torch.nn.Module):
    def forward(self, x):
        return torch.cat([x, x])
def components():
    return {{"first": Component(torch.nn.Linear(16, 32), {{"x": torch.randn(1, 16)}}, ["y"]), {second}}}
"""


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            '"second": Component(torch.nn.Linear(32, 8), {"z": "third.y"}, ["w"])',
            "comes from 'third.y', and there is first.y",
        ),
        (
            '"second": Component(torch.nn.Linear(16, 8), {"z": "first.y"}, ["w"])',
            r"'second': does not run on z float32 \[1, 32\]: RuntimeError",
        ),
        (
            '"second": Component(torch.nn.Linear(32, 8), {"z": "first.y"}, ["w", "v"])',
            "returns 1 tensors, and `outputs` names 2",
        ),
        (
            '"second": Component(torch.nn.Linear(32, 32), {"z": "first.y"}, ["w"], loop=Loop(2, {"w": "u"}))',
            "carries 'w' into 'u', and it has no such",
        ),
        (
            '"second": Component(torch.nn.Linear(32, 32), {"z": "first.y"}, ["w"], loop=Loop(2, {}, {"t": [1.0]}))',
            "gives 1 numbers to 't', and runs 2 times over z",
        ),
        (
            '"second": Component(torch.nn.Linear(32, 8), {"z": "first.y"}, ["w"], loop=Loop(2, {"w": "z"}))',
            r"carries 'w', float32 \[1, 8\], into 'z', which takes float32 \[1, 32\]",
        ),
        (
            '"second": Component(torch.nn.Linear(32, 8), {"z": "first.y"}, ["w"], {"z": {0: "n"}},'
            ' loop=Loop(2, {"w": "z"}))',
            r"carries 'w', float32 \[1, 8\], into 'z', which takes float32 \[1, 32\]",
        ),
        (
            '"second": Component(Halved(), {"z": "first.y"}, ["w"], {"z": {0: "n"}}, loop=Loop(2, {"w": "z"}))',
            r"'second': its loop carries 'w', float16 \[1, 32\], into 'z', which takes float32 \[1, 32\]",
        ),
        ("**{1: 2}", "must return components by name"),
        ("**undefined", "does not run: NameError"),
    ],
)
def test_components_that_do_not_fit(second: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE.format(second=second))
    with pytest.raises(UsageError, match=message) as failure:
        of_file(tmp_path / "model.py")
    assert str(tmp_path / "model.py") in str(failure.value)


def test_a_loop_over_what_grows(tmp_path: Path) -> None:
    """Along an axis that may change."""
    second = '"second": Component(Longer(), {"z": "first.y"}, ["w"], {"z": {0: "n"}}, loop=Loop(3, {"w": "z"}))'
    (tmp_path / "model.py").write_text(FILE.format(second=second))
    assert of_file(tmp_path / "model.py").example.outputs["second.w"].shape == (8, 32)


def test_no_such_function(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    with pytest.raises(BuilderError, match="has no function 'parts'"):
        of_file(Path(f"{tmp_path / 'model.py'}:parts"))


@pytest.mark.slow
def test_a_policy_becomes_engines_calibrated_through_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    monkeypatch.setenv("VLA_STEPS", "2")
    monkeypatch.setenv("VLA_DTYPE", "float16")
    samples = tmp_path / "samples"
    samples.mkdir()
    for number in range(2):
        np.savez(
            samples / f"{number}.npz",
            pixels=rng.random((2, 3, 28, 28)).astype(np.float16),
            instruction=rng.integers(0, 100, (1, 8)),
            actions=rng.standard_normal((1, 10, 8)).astype(np.float16),
            state=rng.standard_normal((1, 8)).astype(np.float16),
        )
    out = tmp_path / "policy"
    request = Request(POLICY, find_target("rtx-blackwell"), out, calib_data=samples)
    report = build.run(request)
    assert [part.plugin_layers for part in report.parts.values()] == [
        2,
        1,
        3,
    ]  # the last layer of the prefix gives keys and values alone; time has an MLP
    assert report.chain["cosine"] > 0.98
    libraries = {part.plugin_library for part in report.parts.values()}
    assert len(libraries) == 1  # beside the engines, once
    assert len(list(out.glob("*.so"))) == 1
    assert (out / "action.statistics.json").is_file()
    # Of two samples, in two steps each.
    found = inspect(out)
    assert found.built.keys() == {"vision", "prefix", "action"}
    assert all("engine" in text for text in found.built.values())
    shown = " ".join(str(cell) for table in tables(found) for column in table.columns for cell in column.cells)
    assert "2 times; next_actions -> actions" in shown
    rows = list(load(POLICY.with_name("predict.py")).rows_of(out))
    assert [(row.part, row.times, row.left_out) for row in rows] == [
        ("vision", 1, 0),
        ("prefix", 1, 0),
        ("action", 2, 0),
    ]
    # Of 10 actions and the state; the time is one row, and as wide as the actions when it meets them.
    assert set(rows[2].rows) <= {1, 10, 11}
    assert all(0 < row.milliseconds["W4A4"] < row.milliseconds["BF16"] for row in rows)
    with Pipeline(out) as pipeline:
        sample = dict(np.load(samples / "0.npz"))
        assert np.isfinite(pipeline.run(sample)["action.next_actions"]).all()


def test_a_bundle_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_STEPS", "2")
    out = tmp_path / "thor"
    request = Request(POLICY, find_target("thor"), bundle=out, precision="bf16")
    report = build.run(request)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["action", "prefix", "vision"]
    assert (out / "build_engine.py").is_file()
    assert all(str(out) in str(part.bundle) for part in report.parts.values())
    assert not list(out.glob("*.onnx*"))
    with Pipeline(out) as pipeline:
        assert pipeline.manifest.part("action").loop is not None
    with pytest.raises(BuilderError, match="exists already"):
        build.run(request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": Path("o.engine")}, "becomes several engines; name a folder, such as -o o"),
        ({"output": Path("o"), "plan": Path("p.yaml")}, "--plan: .* is built part by part"),
        ({"output": Path("o"), "stop_after": "plan"}, "--stop-after: .* is built part by part"),
        ({"output": Path("o"), "all_logits": True}, "--set all-logits=yes"),
        ({"output": Path("o"), "adapter": SimpleNamespace(directory="a")}, "--adapter a: .* makes its modules itself"),
        ({}, "add -o FOLDER or --bundle FOLDER"),
    ],
)
def test_options_of_one_graph(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build.run(Request(POLICY, find_target("rtx-blackwell"), **options))


def test_pi05s_norms_follow_the_time_and_its_mlps_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The chain against its modules on fresh inputs, and the expert's gated MLPs in the plan."""
    monkeypatch.setenv("VLA_STEPS", "2")
    source = of_file(Path(f"{POLICY.with_name('pi05.py')}:components"))
    exported = [part.export("pi05", tmp_path) for part in source.parts]
    manifest = Manifest(source.task, exported, source.flows, {}, "pi05").check()
    manifest.save(tmp_path)
    assert "state" not in manifest.given()
    torch.manual_seed(seed)
    given = {name: torch.randn(array.shape) for name, array in source.example.inputs.items() if array.dtype.kind == "f"}
    given["instruction"] = torch.randint(0, 100, source.example.inputs["instruction"].shape)
    vision, prefix, action = (part.module.module for part in source.parts)
    actions = given["actions"]
    with torch.no_grad():
        cache = prefix(vision(given["pixels"]), given["instruction"])
        for time in (1.0, 0.5):
            actions = action(actions, torch.tensor([time]), *cache)
        norm = action.layers[0].input_layernorm
        x, condition = torch.randn(1, 3, 64), torch.randn(1, 64)
        scale, shift, gate = (condition @ norm.dense.weight.T + norm.dense.bias).split(64, -1)
        y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(norm(x, condition), (y * (1 + scale) + shift, gate[:, None]))
    with Pipeline(tmp_path) as pipeline:
        found = pipeline.run({name: tensor.numpy() for name, tensor in given.items()})
    np.testing.assert_allclose(found["action.next_actions"], actions.numpy(), rtol=1e-4, atol=1e-4)
    planned = trt_nvfp4.plan(tmp_path / "action.onnx", target="thor", output=tmp_path / "action")
    decisions = [entry.decision for entry in planned.subgraphs if entry.kind == "gated_mlp"]
    assert decisions == ["nvfp4_w4a16"] * 2


@pytest.mark.parametrize("head", ["smolvla", "gr00t"])
def test_other_heads(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The chain of parts against their modules, on fresh inputs."""
    monkeypatch.setenv("VLA_STEPS", "2")
    source = of_file(Path(f"{POLICY.with_name('heads.py')}:{head}"))
    manifest = Manifest(source.task, [p.export(head, tmp_path) for p in source.parts], source.flows, {}, head).check()
    manifest.save(tmp_path)
    torch.manual_seed(seed)
    given = {name: torch.randn(array.shape) for name, array in source.example.inputs.items()}
    prefix, action = (part.module.module for part in source.parts)
    actions = given["actions"]
    with torch.no_grad():
        context = prefix(given["features"])
        for time in (1.0, 0.5):
            state = [given["state"]] if "state" in given else []
            actions = action(actions, torch.tensor([time]), *state, *context)
    with Pipeline(tmp_path) as pipeline:
        found = pipeline.run({name: tensor.numpy() for name, tensor in given.items()})
    np.testing.assert_allclose(found["action.next_actions"], actions.numpy(), rtol=1e-4, atol=1e-4)
