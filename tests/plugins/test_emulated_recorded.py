"""The emulator against a real GPU: what an H200 computed, computed again from the same PTX on a CPU."""

import numpy as np
import pytest
import torch
from recorded_runs import FILE, as_bytes, digest, outputs, runs

from trt_nvfp4.plugins.host import PluginHost

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)]
RUNS = runs()


@pytest.mark.parametrize("name", RUNS)
def test_same_as_on_an_h200(emulated: PluginHost, name: str) -> None:
    run, recorded = RUNS[name], np.load(FILE)
    assert (digest(run.inputs) == recorded[f"{name}/inputs"]).all(), "other inputs: record again"
    for index, found in enumerate(outputs(emulated, run)):
        there = recorded[f"{name}/{index}"]
        if run.exact:
            np.testing.assert_array_equal(as_bytes(found), there)
            continue
        expected = torch.from_numpy(there).view(found.dtype).reshape(found.shape).double()
        # One rounding of the result's type, on top of float32's.
        tolerance = torch.finfo(found.dtype).eps + 4e-6
        scale = expected.abs().max()
        assert ((found.double() - expected).abs() <= tolerance * (expected.abs() + scale / 4)).all()
