"""`--parallel`: an engine for each rank, with TensorRT's collective where ranks add up."""

import json
from pathlib import Path
from typing import Any

import attrs
import onnx
import pytest
from parallel_models import DENSE, saved

from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.parallel.manifest import FILE
from trt_nvfp4.builder.pipeline import build_step
from trt_nvfp4.builder.pipeline.ranks_build import _top_k, ranks_of, run
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.collectives import is_collective

pytest.importorskip("transformers")


@pytest.mark.parametrize("parallel", ["tp=1", "tp=0", "tp=65", "ep=2", "2", "tp=2,ep", "tp=2,ep=2,ep=2"])
def test_other_ways_to_split_are_refused(parallel: str) -> None:
    with pytest.raises(UsageError, match="expected tp=N"):
        ranks_of(parallel)


def test_statistics_are_refused(tmp_path: Path) -> None:
    saved("Llama", {**DENSE, "num_hidden_layers": 1}, tmp_path / "model")
    given = tmp_path / "x.statistics.json"
    request = Request(tmp_path / "model", find_target("thor"), bundle=tmp_path / "out", calib_data=given)
    with pytest.raises(BuilderError, match="statistics are of one graph"):
        run(request, "tp=2")
    with pytest.raises(BuilderError, match=r"none\.txt: no such file"):
        run(attrs.evolve(request, calib_data=tmp_path / "none.txt"), "tp=2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["plan", "packed_weights", "accuracy_data", "surgery"])
def test_options_of_one_graph_are_refused(tmp_path: Path, option: str) -> None:
    saved("Llama", {**DENSE, "num_hidden_layers": 1}, tmp_path / "model")
    given: dict[str, Any] = {option: tmp_path / "file.py"}
    request = Request(tmp_path / "model", find_target("thor"), bundle=tmp_path / "out", **given)
    flag = Request.stated(option, "").rstrip(" =")
    with pytest.raises(BuilderError, match=f"{flag}: has no use with --parallel tp=2; leave it out"):
        run(request, "tp=2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("Llama", "tp=3", "attention heads and"),
        ("Mixtral", "tp=2,ep=2", "has 3 experts, which cannot be divided by it"),
    ],
)
def test_what_cannot_be_divided_is_refused_without_weights(
    tmp_path: Path, family: str, parallel: str, message: str
) -> None:
    config = {"model_type": family.lower(), **DENSE, "num_local_experts": 3, "architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        run(Request(tmp_path, find_target("thor"), bundle=tmp_path / "out"), parallel)
    assert not (tmp_path / "out").exists()


def test_an_onnx_file_is_refused(tmp_path: Path) -> None:
    request = Request(tmp_path / "m.onnx", find_target("thor"), bundle=tmp_path / "out")
    with pytest.raises(BuilderError, match="split where it is exported"):
        run(request, "tp=2")


@pytest.mark.slow
def test_bundles_of_two_ranks_appear_whole_with_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("Llama", {**DENSE, "num_hidden_layers": 1}, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    plugins = iter([(None, False), KeyboardInterrupt(), (None, False), (None, False)])

    def interrupted(*_: object) -> object:
        if isinstance(found := next(plugins), BaseException):
            raise found
        return found

    monkeypatch.setattr(build_step, "_plugins", interrupted)
    request = Request(tmp_path / "model", find_target("thor"), bundle=tmp_path / "out", cache_capacity=32)
    with pytest.raises(KeyboardInterrupt):
        run(request, "tp=2")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    report = run(request, "tp=2")
    for name, part in report.parts.items():
        assert part.bundle == str(tmp_path / "out" / name)
        assert all(Path(file).exists() for file in part.files.values())
        assert "trt-nvfp4-" not in (tmp_path / "out" / f"{name}.report.json").read_text().split('"model"')[0]
    for folder in (tmp_path / "out", tmp_path / "out" / "rank0", tmp_path / "out" / "rank1"):
        assert (folder / "tokenizer" / "tokenizer.json").read_text() == "{}"


@pytest.mark.slow
def test_engines_of_two_ranks(tmp_path: Path) -> None:
    """On a CPU, by TensorRT-RTX: its parser takes the collectives, and its builder too."""
    pytest.importorskip("tensorrt_rtx")
    saved("Llama", {**DENSE, "num_hidden_layers": 1}, tmp_path / "model")
    request = Request(tmp_path / "model", find_target("rtx-blackwell"), output=tmp_path / "out", cache_capacity=32)
    report = run(request, "tp=2")
    assert json.loads((tmp_path / "out" / FILE).read_text())["ranks"] == ["rank0", "rank1"]
    assert report.chain["export_error"] < 1e-4
    assert report.chain["cosine"] > 0.95
    for name, part in report.parts.items():
        assert part.engine == str(tmp_path / "out" / f"{name}.engine")
        assert Path(part.engine).stat().st_size > 10_000
        assert any(entry["decision"] == "nvfp4_w4a16" for entry in json.loads(part.json())["subgraphs"])
        rewritten = onnx.load(part.files["rewritten model"], load_external_data=False)
        assert sum(map(is_collective, rewritten.graph.node)) == 3


@pytest.mark.parametrize(
    ("config", "found"),
    [({"moe_topk": 4}, 4), ({"text_config": {"num_experts_per_tok": 2}}, 2), ({"text_config": None}, None)],
)
def test_experts_of_a_token(config: dict[str, object], found: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _top_k(tmp_path) == found
