"""An engine whose plan says nvfp4_mixed: two plugin layers per MLP, W4A4 and W4A16, built on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target

pytest.importorskip("tensorrt_rtx")


@pytest.mark.slow
def test_two_plugin_layers_per_mlp(gated_mlps: Path, rng: np.random.Generator) -> None:
    folder, target = gated_mlps.parent, find_target("rtx-blackwell")
    samples = folder / "x.npz"
    np.savez(samples, x=rng.standard_normal((8, 64)).astype(np.float16))
    options = {"calib_data": samples, "recipe": "mse+activation-sweep+residual:32"}
    pipeline.run(Request(gated_mlps, target, folder / "a.engine", stop_after="plan", **options))
    plan = yaml.safe_load((folder / "a.plan.yaml").read_text())
    for entry in plan["subgraphs"]:
        entry["decision"], entry["op"] = "nvfp4_mixed", "NVFP4Linear"
    edited = folder / "edited.plan.yaml"
    edited.write_text(yaml.safe_dump(plan))

    report = pipeline.run(Request(gated_mlps, target, folder / "b.engine", plan=edited, **options))

    assert {entry["realized"] for entry in report.subgraphs} == {"nvfp4 plugins"}
    assert report.plugin_layers == 2 * len(plan["subgraphs"])
