"""Hugging Face directories of mixtures of experts become engines with one plugin layer per block, on a CPU."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from command_lines import invoked
from tiers import tiers

from onnx_models import moe_zoo
from onnx_models.zoo import LAYERS
from trt_nvfp4.builder.cli.build_engine import app

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")


# Those that differ in what is built; the others' graphs are test_moe.py's.
NAMES = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "gpt_oss", "llama4", "qwen2_moe", "flex_olmo")
NAMES += ("gemma4", "minimax_m3", "nemotron_h", "phimoe")


@pytest.mark.parametrize("name", tiers(NAMES, quick=["deepseek_v3"], slow=["gpt_oss", "llama4", "nemotron_h"]))
def test_one_plugin_layer_per_block(name: str, tmp_path: Path, seed: int) -> None:
    entry = moe_zoo.MOE_ZOO[name]
    config = getattr(transformers, entry.config)(**entry.arguments)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    options = ["-o", str(tmp_path / "o.engine"), "--target", "rtx-blackwell", "--require", "nvfp4", "--json"]
    shapes = ["--task", "features", "--max-shapes", "input_ids:2x16,attention_mask:2x16"]

    result = invoked(app, [tmp_path / "model", *options, *shapes])
    report = json.loads(result.stdout)
    blocks = [subgraph for subgraph in report["subgraphs"] if subgraph["kind"] == "moe"]
    assert [block["realized"] for block in blocks] == ["nvfp4 plugin"] * LAYERS
    assert {block["shapes"]["top_k"] for block in blocks} == {moe_zoo.ROUTING[name]["top_k"]}
    replaced = [subgraph for subgraph in report["subgraphs"] if subgraph["realized"] == "nvfp4 plugin"]
    assert report["plugin_layers"] == len(replaced)  # Gemma 4 and Nemotron-H have MLPs beside their mixtures
    plan = (tmp_path / "o.plan.yaml").read_text()
    assert plan.count("kind: moe") == plan.count("op: NVFP4MoE") == LAYERS
