"""Engines of all parts of each family, built with TensorRT-RTX, and a bundle for Thor."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.pipeline import parts_build as build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target

from .families import saved
from .test_families import size_of

#: Of families whose parts are alike, one.
BUILT = ("paligemma", "qwen3_vl", "t5", "whisper")
RARER = ("gemma4", "gemma4_per_layer", "voxtral")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUILT, *(pytest.param(name, marks=pytest.mark.nightly) for name in RARER)])
def test_engines_of_all_parts(name: str, tmp_path: Path, seed: int) -> None:
    """Each part's planned plugin layers are in its engine; one library lies beside all."""
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    saved(name, tmp_path / name, seed)
    out = tmp_path / "out"
    request = Request(
        tmp_path / name,
        find_target("rtx-blackwell"),
        out,
        cache_capacity=64,
        max_batch=2,
        image_size=size_of(name),
        accuracy_samples=0,
    )
    report = build.run(request)
    for part in Manifest.load(out).parts:
        built = report.parts[part.name]
        assert (out / f"{part.name}.engine").is_file()
        planned = [entry for entry in built.subgraphs if entry["decision"] != "keep"]
        assert built.plugin_layers == len(planned)
        assert bool(planned) == (part.name != "embed")
    assert len(list(out.glob("*.so"))) == 1


@pytest.mark.slow
def test_a_bundle_of_a_family(tmp_path: Path, seed: int) -> None:
    saved("t5", tmp_path / "t5", seed)
    request = Request(
        tmp_path / "t5", find_target("thor"), bundle=tmp_path / "out", cache_capacity=64, accuracy_samples=0
    )
    report = build.run(request)
    assert report.parts.keys() == {"encoder", "decoder"}
    assert all((tmp_path / "out" / part / "build_engine.py").is_file() for part in report.parts)
