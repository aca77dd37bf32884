"""Tactics between TensorRT and the kernels: what the adapters offer, set, keep and fall back to, over kernels that only
tell which of them ran (fake_kernels.cpp). Which tactics the real ones have: test_emulated_tactics.py."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import op_inputs
import pytest
import torch

from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_nvcc
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS

AUTO, GENERIC, W4A16, W4A4, W4A4_PAIR, MMA_SYNC = 0, 1, 2, 3, 4, 6


def test_the_page_lists_every_tactic() -> None:
    declared = (ROOT / "kernels" / "api" / "trt_nvfp4.h").read_text()
    page = (ROOT.parent / "docs" / "figures" / "tactics.md").read_text()
    tactics = re.findall(r"^    TRT_NVFP4_TACTIC_(\w+) = (\d+)", declared, re.MULTILINE)
    assert tactics
    assert re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE) == tactics


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> PluginHost:
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("fake")
    library = folder / "libfake.so"
    (folder / op_header.NAME).write_text(op_header.op_header())
    sources = [Path(__file__).with_name("fake_kernels.cpp"), ROOT / "kernels" / "api" / "error.cpp"]
    sources += sorted((ROOT / "adapters").glob("*.cpp"))
    flags = [
        "-shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        f"-I{ROOT}",
        f"-I{ROOT / 'kernels'}",
        f"-I{ROOT / 'adapters'}",
        f"-I{folder}",
    ]
    exports = f"-Xlinker=--version-script={ROOT / 'adapters' / 'exports.map'}"
    subprocess.run([nvcc.nvcc, *nvcc.link_flags(), *flags, exports, *sources, "-o", library], check=True)
    return PluginHost(library)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def linear(m: int) -> list[torch.Tensor]:
    inputs = op_inputs.linear(np.random.default_rng(m), m, 8, 32, torch.float32).inputs
    return [inputs[0].reshape(m, 32), *inputs[1:]]


def invoked(host: PluginHost, m: int, tactic: int) -> int:
    with host.session("NVFP4Linear", linear(m), tactic=tactic) as session:
        return int(session.run(linear(m))[0].view(-1)[0])


@pytest.mark.parametrize(
    ("fewest", "most", "offered"),
    [
        (8, 8, []),  # a single one: nothing to time
        (32, 32, [W4A16, MMA_SYNC]),
        (17, 64, [W4A16, MMA_SYNC]),
        (1, 64, []),  # one of the two is for the upper end only
        (32, 100, []),  # AUTO changes over in between
        (65, 900, [W4A4_PAIR, W4A4]),
    ],
)
def test_offered_where_one_timing_speaks_for_the_whole_profile(
    fake: PluginHost, fewest: int, most: int, offered: list[int]
) -> None:
    with fake.session("NVFP4Linear", linear(fewest), max_inputs=linear(most)) as session:
        assert session.tactics == offered
        assert AUTO not in session.tactics  # TensorRT's own number for the default
        # Asking again, as for the next format, changes nothing.
        session._configure()
        assert session.tactics == offered


@pytest.mark.usefixtures("on_cpu")
def test_the_set_tactic_runs(fake: PluginHost) -> None:
    """Set before the context is made, it is inherited; set later, it replaces the first."""
    assert invoked(fake, 32, AUTO) == AUTO  # the kernels resolve it
    for tactic in (W4A16, MMA_SYNC, GENERIC):
        assert invoked(fake, 32, tactic) == tactic
    with fake.session("NVFP4Linear", linear(32), tactic=MMA_SYNC) as session:
        session.set_tactic(W4A16)
        assert int(session.run(linear(32))[0].view(-1)[0]) == W4A16
        assert session.metadata.endswith(" tactic=2")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tactic", [MMA_SYNC, W4A4, 999, -1])
def test_auto_stands_in_for_a_tactic_that_cannot_serve(fake: PluginHost, tactic: int) -> None:
    with fake.session("NVFP4Linear", linear(8), max_inputs=linear(500), tactic=tactic) as session:
        y, workspace = torch.full((8, 8), torch.nan), torch.empty(session.workspace_size, dtype=torch.uint8)
        with pytest.raises(HostError, match=f"NVFP4Linear: tactic {tactic} cannot serve this call; AUTO did"):
            session.enqueue(linear(8), [y], workspace)
        assert y[0, 0] == AUTO
        # The tactic stays set for shapes that it serves.
        served = {MMA_SYNC: 40, W4A4: 70}.get(tactic)
        if served is not None:
            assert int(session.run(linear(served))[0].view(-1)[0]) == tactic


def test_workspace_is_enough_for_auto_and_for_what_is_set(fake: PluginHost) -> None:
    sizes = {}
    for tactic in (AUTO, GENERIC, W4A16):
        with fake.session("NVFP4Linear", linear(3), max_inputs=linear(40), tactic=tactic) as session:
            sizes[tactic] = session.workspace_size
    assert sizes == {AUTO: 400, GENERIC: 4000, W4A16: 400}


@pytest.mark.usefixtures("on_cpu")
def test_kernels_check_against_the_workspace_of_the_largest_shapes(fake: PluginHost) -> None:
    """Which the engine keeps, and not against what the shapes at hand would need."""
    for most, given in ((3, 1024), (400, 4096)):
        with fake.session("NVFP4Linear", linear(3), max_inputs=linear(most)) as session:
            assert session.run(linear(3))[0].view(-1)[1] == given


def test_the_timing_cache_tells_attributes_apart_and_not_tactics(fake: PluginHost) -> None:
    def cache_id(tactic: int, **attributes: int) -> str:
        with fake.session("NVFP4Linear", linear(32), attributes, tactic=tactic) as session:
            assert session.serialized.keys() == {*OPS["NVFP4Linear"].attributes, "workspace_kib"}
            return session.timing_cache_id

    assert cache_id(W4A16) == cache_id(MMA_SYNC) != cache_id(W4A16, quantize_activations=1)


@pytest.mark.usefixtures("on_cpu")
def test_an_enqueue_that_fails_says_why(fake: PluginHost) -> None:
    with (
        fake.session("NVFP4Linear", linear(3), {"activation": 1}) as session,
        pytest.raises(HostError, match="enqueue of NVFP4Linear failed: fake_kernel: cudaErrorLaunchOutOfResources"),
    ):
        session.run(linear(3))
    of_another_gpu = "cudaErrorNoKernelImageForDevice.*compiled for another GPU: build the engine with the --target of"
    with (
        fake.session("NVFP4Linear", linear(3), {"activation": 2}) as session,
        pytest.raises(HostError, match=of_another_gpu),
    ):
        session.run(linear(3))
    larger = [linear(3)[0], *linear(3)[1:4], torch.zeros(9), torch.zeros(())]
    with (
        fake.session("NVFP4Linear", linear(3)) as session,
        pytest.raises(HostError, match=r"onShapeChange.*input bias must have shape \[8\], it has \[9\]"),
    ):
        session.enqueue(larger, [torch.empty(3, 8)], torch.empty(64, dtype=torch.uint8))


@pytest.mark.usefixtures("on_cpu")
def test_a_session_takes_what_it_was_made_for(fake: PluginHost) -> None:
    """What a kernel could not tell: it sees pointers, and a workspace for the session's largest shapes."""
    x, *constants = linear(8)
    y = torch.empty(8, 8)
    with fake.session("NVFP4Linear", linear(3), max_inputs=[x, *constants]) as session:
        enough = torch.empty(session.workspace_size, dtype=torch.uint8)
        for inputs, outputs, workspace, message in (
            (linear(9), [torch.empty(9, 8)], enough, r"input 0 has shape \[9, 32\], the session.s largest is \[8, 32"),
            ([x.half(), *constants], [y], enough, r"input 0 is torch.float32 of 2 .*found torch.float16"),
            ([x, *constants[:-1]], [y], enough, "the session has 6 inputs, found 5"),
            ([x.T.contiguous().T, *constants], [y], enough, r"input 0 is not contiguous, with strides \[1, 8\]"),
            ([x, *constants], [torch.empty(8, 16)[:, ::2]], enough, "output 0 is not contiguous"),
            ([x, *constants], [y], enough[1:], "the workspace holds 79 bytes of 80"),
        ):
            with pytest.raises(HostError, match=message):
                session.enqueue(inputs, outputs, workspace)
        (copied,) = session.run([x.T.contiguous().T, *constants])
        assert copied.shape == (8, 8)


@pytest.mark.parametrize(
    ("inputs", "attributes", "largest", "message"),
    [
        (linear(3), {"activation": 1 << 40}, linear(3), "attribute activation must be .* 32 bits, found 1099511627776"),
        (linear(3), {"activation": "silu"}, linear(3), "attribute activation must be one INT, it is 4 of"),
        (linear(3), {}, linear(2), r"input 0 has shape \[3, 32\], the session's largest is \[2, 32\]"),
        (linear(3), {}, linear(3)[1:], "the session has 6 inputs, found 5"),
        ([linear(3)[0].double(), *linear(3)[1:]], {}, None, "a plugin's tensor cannot be torch.float64"),
        ([linear(3)[0].reshape(1, 1, 1, 1, 1, 1, 1, 3, 32), *linear(3)[1:]], {}, None, "at most 8 dimensions"),
    ],
)
def test_a_session_that_cannot_be_says_why(
    fake: PluginHost,
    inputs: list[torch.Tensor],
    attributes: dict[str, Any],
    largest: list[torch.Tensor] | None,
    message: str,
) -> None:
    with pytest.raises(HostError, match=message):
        fake.session("NVFP4Linear", inputs, attributes, max_inputs=largest)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activation": 9}, "NVFP4Linear: attribute activation must be 0 to 8, it is 9"),
        ({"scale_search": -1}, "NVFP4Linear: attribute scale_search must be 0 to 2, it is -1"),
        ({"static_scales": 2}, "NVFP4Linear: attribute static_scales must be 0 to 1, it is 2"),
    ],
)
def test_attributes_out_of_range(fake: PluginHost, attributes: dict[str, int], message: str) -> None:
    with pytest.raises(HostError, match=message), fake.session("NVFP4Linear", linear(8), attributes):
        pass
