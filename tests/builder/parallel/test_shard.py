"""Ranks of small random models, run together, compute what transformers computes with the whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from parallel_models import DENSE, LATENT, MIXTURE, saved

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.parallel.shard import Rank, shard
from trt_nvfp4.builder.parallel.simulate import prefix, simulated
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.collectives import is_collective

transformers = pytest.importorskip("transformers")

CAPACITY, NEW = 16, 5
#: Family, its configuration, ranks, shares of experts, and heads in a rank's caches. Four and eight ranks share two
#: heads of keys.
CASES = [
    ("Llama", DENSE, 2, 1, 1),
    ("Llama", {**DENSE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 4, 1, 1),
    ("Qwen3Moe", MIXTURE, 2, 1, 1),
    ("DeepseekV3", LATENT, 2, 1, 1),
    ("Qwen3Moe", {**MIXTURE, "num_experts": 8, "num_hidden_layers": 1}, 8, 4, 1),
    ("DeepseekV3", LATENT, 4, 4, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "config", "count", "spread", "heads"), CASES, ids=lambda value: str(value)[:10])
def test_ranks_together_are_the_model(
    family: str, config: dict[str, Any], count: int, spread: int, heads: int, tmp_path: Path
) -> None:
    model = saved(family, config, tmp_path / "model")
    ranks = [
        export(tmp_path / "model", tmp_path / f"rank{i}.onnx", "generate", CacheOptions(CAPACITY, 2), rank=rank)
        for i, rank in enumerate(Rank(index, count, spread) for index in range(count))
    ]
    ids = np.random.default_rng(1).integers(3, 101, (2, NEW))
    found = together(ranks, tmp_path, ids, heads)
    assert len(found) == count
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    for logits in found:  # which every rank has
        assert np.linalg.norm(logits - expected) <= 1e-5 * np.linalg.norm(expected)
    # Each rank holds a part, and the embedding whole.
    held = [sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer) for path in ranks]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert max(held) < 0.8 * whole


def together(ranks: list[Path], folder: Path, ids: np.ndarray, heads: int | None = None) -> list[np.ndarray]:
    """Every rank's logits, over empty caches with so many heads."""
    onnx.save(simulated(ranks), folder / "together.onnx")
    runner = session(folder / "together.onnx")
    feeds: dict[str, np.ndarray] = {}
    for port in runner.get_inputs():
        name = port.name.partition(".")[2]
        given = {"input_ids": ids, "past_length": np.zeros(2, np.int64), "new_length": np.full(2, NEW)}
        feeds[port.name] = given[name] if name in given else np.zeros([2, *port.shape[1:]], np.float32)
        assert name in given or heads is None or port.shape[1:3] == [heads, CAPACITY]
    found: list[np.ndarray] = runner.run([prefix(i) + "logits" for i in range(len(ranks))], feeds)
    return found


@pytest.mark.slow
def test_whole_experts_on_each_rank_become_plugins(tmp_path: Path) -> None:
    """Of the experts that a rank has; a token that chose none of them gets zeros. Routers stay as they are."""
    saved("Qwen3Moe", {**MIXTURE, "num_hidden_layers": 1}, tmp_path / "model")
    rewritten = []
    for index in range(2):
        file = tmp_path / f"rank{index}.onnx"
        export(tmp_path / "model", file, "generate", CacheOptions(CAPACITY, 2), rank=Rank(index, 2, 2))
        request = Request(
            file,
            find_target("rtx-blackwell"),
            output=file.with_suffix(".engine"),
            activations="keep",
            kinds=("moe",),
            stop_after="rewrite",
            accuracy_samples=0,
        )
        report = pipeline.run(request)
        rewritten.append(Path(report.files["rewritten model"]))
        (moe,) = (entry for entry in report.subgraphs if entry["kind"] == "moe")
        assert (moe["decision"], moe["shapes"]["experts"]) == ("nvfp4_w4a16", 2)
    ids = np.random.default_rng(1).integers(3, 101, (2, NEW))
    exact = together([tmp_path / f"rank{index}.onnx" for index in range(2)], tmp_path, ids)
    found = together(rewritten, tmp_path, ids)
    for logits, expected in zip(found, exact, strict=True):
        assert 0 < np.linalg.norm(logits - expected) <= 0.2 * np.linalg.norm(expected)


def test_collectives_are_where_a_layer_ends(tmp_path: Path) -> None:
    saved("Llama", DENSE, tmp_path / "model")
    file = export(tmp_path / "model", tmp_path / "m.onnx", "generate", CacheOptions(CAPACITY), rank=Rank(0, 2))
    proto = onnx.load(file)
    onnx.checker.check_model(proto)
    nodes = [node for node in proto.graph.node if is_collective(node)]
    assert len(nodes) == 2 * DENSE["num_hidden_layers"] + 1  # attention, MLP, and the head
    assert {next(a.i for a in node.attribute if a.name == "nb_rank") for node in nodes} == {2}


def test_ranks_that_do_not_correspond_are_refused(tmp_path: Path) -> None:
    for name, layers in (("a", 1), ("b", 2)):
        saved("Llama", {**DENSE, "num_hidden_layers": layers}, tmp_path / name)
    files = [
        export(tmp_path / name, tmp_path / f"{name}.onnx", "generate", CacheOptions(CAPACITY), rank=Rank(i, 2))
        for i, name in enumerate("ab")
    ]
    with pytest.raises(ModelFaultError, match="3, 5 collectives"):
        simulated(files)


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({}, 3, "8 attention heads"),
        (
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "12 attention heads and 3 of keys",
        ),
        ({"intermediate_size": 130}, 4, "mlp.gate_proj has 130 rows"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], count: int, message: str) -> None:
    config = transformers.LlamaConfig(**{**DENSE, "num_hidden_layers": 1, **changes})
    with pytest.raises(UsageError, match=message):
        shard(transformers.LlamaForCausalLM(config), Rank(0, count), "m")


def test_a_family_without_a_plan_is_refused() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=100)
    with pytest.raises(BuilderError, match="no tensor-parallel plan for GPT2LMHeadModel"):
        shard(transformers.GPT2LMHeadModel(config), Rank(0, 2), "m")
