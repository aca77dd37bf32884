"""The target table."""

import platform
import subprocess
import sys

import pytest

from trt_nvfp4.builder.errors import BuilderError, UnavailableError, UsageError
from trt_nvfp4.builder.options import entries_of
from trt_nvfp4.builder.pipeline.build_options import BuildOptions
from trt_nvfp4.builder.targets import TARGETS, arch_of, find_target, require_here


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as failure:
        find_target("h1000")
    assert all(name in str(failure.value) for name in TARGETS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_arch_belongs_to_the_compute_capability(target) -> None:
    major, _ = target.compute_capability
    assert target.arch == arch_of(target.compute_capability)
    # FP4 instructions came with Blackwell, and need the arch-specific feature set.
    assert target.fp4_instructions == (major >= 10)
    assert target.arch.endswith("a") or not target.fp4_instructions


@pytest.mark.parametrize("name", ["thor", "b200"])
def test_target_of_another_machine_points_to_the_bundle(name: str) -> None:
    with pytest.raises(UnavailableError, match="--bundle"):
        require_here(find_target(name))


def test_target_with_another_processor_is_not_built_for_whatever_is_installed() -> None:
    """TensorRT-RTX could build Spark's engine here, but not check it with the plugin library."""
    others = [target for target in TARGETS.values() if target.host != platform.machine()]
    assert others
    for target in others:
        with pytest.raises(BuilderError, match=f"library runs on {target.host}, this machine is {platform.machine()}"):
            require_here(target)


@pytest.mark.parametrize(
    ("installed", "gpu", "needed"),
    [
        ([], None, "tensorrt-rtx"),
        (["tensorrt"], None, "tensorrt-rtx"),
        ([], (8, 9), "tensorrt-rtx or tensorrt"),
        (["tensorrt"], (8, 9), None),
        (["tensorrt_rtx"], None, None),
    ],
)
def test_packages_to_install_are_those_that_can_build(
    installed: list[str], gpu: tuple[int, int] | None, needed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that pip knows. tensorrt builds only for a GPU that is here."""
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module if module in installed else None)
    monkeypatch.setattr("trt_nvfp4.builder.cuda.driver.local_compute_capability", lambda: gpu)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(BuilderError, match="no such GPU"):
        require_here(find_target("b200"))
    if needed is None:
        require_here(find_target("ada"))
        return
    words = rf"it needs {needed}, which is not installed here \(pip install tensorrt-rtx\); add --bundle DIR"
    with pytest.raises(UnavailableError, match=words):
        require_here(find_target("ada"))


def test_help_names_every_target() -> None:
    # The help must not import the table: it would import the graph passes.
    (target,) = (entry for entry in entries_of(BuildOptions) if entry.name == "target")
    assert all(name in target.option.help for name in TARGETS)


def test_a_misspelt_target_is_told_before_torch_is_imported() -> None:
    code = """
import sys
from trt_nvfp4.builder.cli.build_engine import app
try:
    app(["model.onnx", "-o", "o.engine", "--target", "rtx-blackwel"])
except SystemExit as end:
    sys.exit(f"{end.code} {'torch' in sys.modules} {'onnx' in sys.modules}")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "did you mean 'rtx-blackwell'?" in " ".join(run.stderr.split())
    assert run.stderr.splitlines()[-1] == "2 False False"
