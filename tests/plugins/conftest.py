"""Plugin libraries, for the GPU at hand or else for the default target."""

import sys
from pathlib import Path

import pytest
import torch

from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.compile.toolchain import ToolchainError

# The name `plugins` belongs to the package under test where that lies in the working directory.
sys.path.insert(0, str(Path(__file__).parent))
from emulated_gpu import emulated, emulated_gpu  # noqa: F401  fixtures
from split_host import SplitHost


def build(groups: frozenset[str] | None = None) -> Path:
    arch = "sm_120a"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    try:
        return build_library(arch, groups=groups)
    except ToolchainError as error:
        if "no CUDA compiler found" in str(error):
            pytest.skip(str(error))
        raise


# GPUs and architectures whose kernels are those of another one that the default run compiles and emulates: W4A16 by
# mma.sync runs on rtx-blackwell and h200, FP8 by mma.sync on rtx-blackwell, W4A4 of SM100 on b200.
NIGHTLY = {"a100", "ada", "b300", "thor", "spark", "sm_80", "sm_89", "sm_110a"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value in NIGHTLY for value in values):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def library() -> Path:
    """With all kernels."""
    return build()


@pytest.fixture(scope="session")
def host() -> SplitHost:
    return SplitHost(build)
