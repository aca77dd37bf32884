"""The plugin library, for the GPU at hand or else for the default target."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.compile.toolchain import ToolchainError
from trt_nvfp4.plugins.host import PluginHost

# The name `plugins` belongs to the package under test where that lies in the working directory.
sys.path.insert(0, str(Path(__file__).parent))
from emulated_gpu import emulated, emulated_gpu  # noqa: F401  fixtures


@pytest.fixture(scope="session")
def library() -> Path:
    arch = "sm_120a"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    try:
        return build_library(arch)
    except ToolchainError as error:
        if "no CUDA compiler found" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def host(library: Path) -> PluginHost:
    return PluginHost(library)
