"""Engines of small decoders for a GPU that is not here: one plugin layer per planned subgraph, caches in place.

Four families run as tests. By hand, for all or some: python tests/builder/export/test_decoder_engines.py [FAMILY ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
pytest.importorskip("transformers")

from onnx_models.small_decoders import FAMILIES, saved
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export import torch_module
from trt_nvfp4.builder.export.decoder_contract import decoder_of
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target


def built(family: str, folder: Path, seed: int = 0, precision: str = "auto") -> Report:
    """The report of a verified engine for rtx-blackwell. Raises BuilderError as `pipeline.run` does."""
    saved(family, folder / family, seed)
    request = pipeline.Request(
        model=folder / family,
        target=find_target("rtx-blackwell"),
        output=folder / "o.engine",
        max_batch=2,
        precision=precision,
    )
    return pipeline.run(request)


def problems(report: Report, folder: Path) -> list[str]:
    """What of the engine is not one plugin layer per subgraph planned as a plugin, or a cache that is not in place."""
    decoder = decoder_of(read(folder / "o.rewritten.onnx"))
    assert decoder is not None
    found = []
    plugins = [entry for entry in report.subgraphs if "plugin" in entry["realized"]]
    if report.plugin_layers != len(plugins):
        found.append(f"{report.plugin_layers} plugin layers for {len(plugins)} subgraphs")
    if report.caches_in_place != 2 * decoder.layers:
        found.append(f"{report.caches_in_place} caches in place, of {2 * decoder.layers}")
    return found


# Who computes attention.
ATTENTION = {
    "llama": "attention plugin",  # with FP8 weights, which TensorRT reads in each of its two profiles
    "gpt_oss": "attention plugin",
    "qwen3": "attention plugin",
    "deepseek_v3": "as in the model",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ATTENTION)
def test_engines_hold_what_is_planned(family: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "qwen3":  # with weights and tables in a file of their own, as large models have them
        monkeypatch.setattr(torch_module, "EXTERNAL_DATA_BYTES", 0)
    report = built(family, tmp_path, seed, "fp8" if family == "llama" else "auto")
    assert (tmp_path / "o.onnx.data").is_file() == (family == "qwen3")
    assert problems(report, tmp_path) == []
    decoder = decoder_of(read(tmp_path / "o.rewritten.onnx"))
    assert decoder is not None
    attention = [entry["realized"] for entry in report.subgraphs if entry["kind"] == "attention"]
    assert attention == [ATTENTION[family]] * decoder.layers
    joined = [entry for entry in report.subgraphs if entry["name"].endswith("self_attn")]  # Q, K and V, or their parts
    linear = "fp8" if family == "llama" else "nvfp4 plugin"
    assert [(entry["kind"], entry["realized"]) for entry in joined] == [("linear", linear)] * decoder.layers
    assert report.network["type"] == "bf16"


def main(families: list[str]) -> int:
    failed = 0
    for family in families or list(FAMILIES):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = built(family, Path(folder))
                wrong = problems(report, Path(folder))
                kept = sum(entry["decision"] == "keep" for entry in report.subgraphs)
                said = f"{report.plugin_layers} plugin layers, {kept} subgraphs kept, {report.caches_in_place} caches"
            except BuilderError as error:
                wrong, said = [str(error)], ""
        failed += bool(wrong)
        print(f"{family}: {'; '.join(wrong) or 'as planned'} ({said}, {time.monotonic() - begun:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
