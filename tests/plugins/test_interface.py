"""The project's declaration of TensorRT's plugin interface against TensorRT's own headers, where the user has them."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import op_inputs
import pytest
import torch

from trt_nvfp4.plugins.compile.library import ROOT, build_library
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_nvcc
from trt_nvfp4.plugins.host import PluginHost

HERE = Path(__file__).parent


@pytest.fixture
def tensorrt_headers() -> Path:
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    if not named:
        pytest.skip("TENSORRT_INCLUDE_DIR is not set; TensorRT's C++ headers are in no registry package")
    return Path(named)


def probe(tmp_path: Path, *flags: str) -> str:
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    program = tmp_path / "probe"
    subprocess.run([nvcc.nvcc, *nvcc.link_flags(), *flags, HERE / "interface_probe.cpp", "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_declaration_is_the_frozen_one(tmp_path: Path) -> None:
    """Anchors that need no headers: what TensorRT's binaries expect, as recorded from 10.13 to 11.1."""
    found = probe(tmp_path, f"-I{ROOT / 'interface'}")
    for line in (
        "size Dims 72 align 8",
        "offset PluginTensorDesc::type 72",
        "size DynamicPluginTensorDesc 304 align 8",
        "slot IVersionedInterface::getInterfaceInfo 1",
        # Two slots of destructor lie between.
        "slot IPluginV3::getCapabilityInterface 4",
        "slot IPluginV3OneBuild::getMetadataString 14",
        "slot IPluginV3OneRuntime::getFieldsToSerialize 8",
        "slot IPluginCreatorV3One::createPlugin 4",
        "interface PLUGIN_V3ONE_BUILD 1.0 language 0",
        "interface PLUGIN CREATOR_V3ONE 1.0 language 0",
    ):
        assert line in found.splitlines()


def test_declaration_equals_the_headers(tmp_path: Path, tensorrt_headers: Path) -> None:
    ours = probe(tmp_path, f"-I{ROOT / 'interface'}")
    theirs = probe(tmp_path, "-DTRT_NVFP4_TENSORRT_HEADERS", f"-isystem={tensorrt_headers}")
    assert ours == theirs


def test_library_of_the_headers_behaves_the_same(
    library: Path, host: PluginHost, tensorrt_headers: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host, built from our declaration, drives a library built from TensorRT's headers."""
    arch = re.search(r"sm_\d+[a-z]?", library.name)
    assert arch is not None
    theirs = PluginHost(build_library(arch[0]))
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    ours = PluginHost(build_library(arch[0]))
    inputs = op_inputs.gated_mlp(np.random.default_rng(seed), 3, 48, 32, 40, torch.float16).inputs
    largest = [inputs[0].repeat(9, 1), *inputs[1:]]
    assert ours.ops == theirs.ops
    lives = []
    for either in (ours, theirs):
        with either.session("NVFP4GatedMLP", inputs, {"quantize_activations": 1}, max_inputs=largest) as session:
            lives.append(
                (session.serialized, session.workspace_size, session.output_shapes(inputs), session.timing_cache_id)
            )
    assert lives[0] == lives[1]
