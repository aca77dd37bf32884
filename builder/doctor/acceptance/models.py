"""Small models with random weights, one for each kind of subgraph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

WIDTH, HIDDEN = 256, 512


def mlp(folder: Path) -> Path:
    """An ONNX file: a linear, a gated MLP and a residual; input `x` [rows, 256] in float16."""
    rng = np.random.default_rng(1)
    shapes = {"w": (WIDTH, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float16), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "linear"),
        helper.make_node("MatMul", ["h", "gate"], ["g"], "mlp/gate"),
        helper.make_node("MatMul", ["h", "up"], ["u"], "mlp/up"),
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["g", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "u"], ["gated"]),
        helper.make_node("MatMul", ["gated", "down"], ["d"], "mlp/down"),
        helper.make_node("Add", ["x", "d"], ["y"]),
    ]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["rows", WIDTH]) for name in "xy"]
    graph = helper.make_graph(nodes, "mlp", tensors[:1], tensors[1:], weights)
    path = folder / "mlp.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def llama(folder: Path) -> Path:
    """A Hugging Face directory: two dense decoder layers with grouped-query attention."""
    from transformers import LlamaConfig

    return _directory(folder, LlamaConfig(**SIZES, intermediate_size=HIDDEN))


def mixture(folder: Path) -> Path:
    """A Hugging Face directory: two decoder layers with eight experts, two of them for each token."""
    from transformers import Qwen3MoeConfig

    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    return _directory(folder, Qwen3MoeConfig(**SIZES, intermediate_size=HIDDEN, **experts))


def hybrid(folder: Path) -> Path:
    """A Hugging Face directory: a layer with a recurrent state and one with attention."""
    from transformers import Lfm2Config

    sizes = {**SIZES, "layer_types": ["conv", "full_attention"]}
    return _directory(folder, Lfm2Config(**sizes, intermediate_size=HIDDEN, block_auto_adjust_ff_dim=False))


SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def _directory(folder: Path, config: object) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    path = folder / "model"
    AutoModelForCausalLM.from_config(config).to(torch.float16).save_pretrained(path)
    return path


#: What makes each model in a folder; those of a Hugging Face directory are decoders.
MODELS: dict[str, Callable[[Path], Path]] = {"mlp": mlp, "llama": llama, "mixture": mixture, "hybrid": hybrid}
