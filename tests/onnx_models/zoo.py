"""Small transformers models with random weights, exported to ONNX: what the passes must find their way in."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LAYERS = 2
_TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_DECODER = {**_TEXT, **_SIZES, "num_key_value_heads": 2}
_VISION = {**_SIZES, "image_size": 16, "patch_size": 8}


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: its class and configuration in transformers, and what its MLPs are."""

    model: str
    config: str
    arguments: dict[str, Any]
    kind: str
    activation: str
    torchscript: bool = True
    mlps: int = LAYERS
    vision: bool = False


ZOO: dict[str, Entry] = {
    "llama": Entry("LlamaModel", "LlamaConfig", _DECODER, "gated_mlp", "silu"),
    "gemma2": Entry("Gemma2Model", "Gemma2Config", {**_DECODER, "head_dim": 16}, "gated_mlp", "gelu_tanh"),
    "qwen3": Entry("Qwen3Model", "Qwen3Config", {**_DECODER, "head_dim": 16}, "gated_mlp", "silu"),
    "modernbert": Entry(
        "ModernBertModel",
        "ModernBertConfig",
        {**_TEXT, **_SIZES, "cls_token_id": 1, "sep_token_id": 2, "attn_implementation": "sdpa"},
        "gated_mlp",
        "gelu",
    ),
    "bert": Entry("BertModel", "BertConfig", {**_TEXT, **_SIZES}, "mlp", "gelu"),
    "vit": Entry("ViTModel", "ViTConfig", _VISION, "mlp", "gelu", vision=True),
    "gpt2": Entry(
        "GPT2Model", "GPT2Config", {**_TEXT, "n_embd": 64, "n_layer": LAYERS, "n_head": 4}, "mlp", "gelu_tanh"
    ),
    "t5": Entry(
        "T5EncoderModel",
        "T5Config",
        {
            **_TEXT,
            "d_model": 64,
            "d_ff": 96,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": LAYERS,
            "feed_forward_proj": "gated-gelu",
        },
        "gated_mlp",
        "gelu_tanh",
    ),
    "t5_relu": Entry(
        "T5EncoderModel",
        "T5Config",
        {**_TEXT, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": LAYERS},
        "mlp",
        "relu",
    ),
    "phi": Entry("PhiModel", "PhiConfig", {**_TEXT, **_SIZES}, "mlp", "gelu_tanh"),
    "phi3": Entry("Phi3Model", "Phi3Config", _DECODER, "gated_mlp", "silu"),
    "opt": Entry(
        "OPTModel",
        "OPTConfig",
        {
            **_TEXT,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
        },
        "mlp",
        "relu",
    ),
    "mistral": Entry("MistralModel", "MistralConfig", _DECODER, "gated_mlp", "silu"),
    "falcon": Entry("FalconModel", "FalconConfig", {**_TEXT, **_SIZES, "ffn_hidden_size": 96}, "mlp", "gelu"),
    "gpt_neox": Entry("GPTNeoXModel", "GPTNeoXConfig", {**_TEXT, **_SIZES}, "mlp", "gelu"),
    "siglip": Entry("SiglipVisionModel", "SiglipVisionConfig", _VISION, "mlp", "gelu_tanh", vision=True),
    "clip": Entry("CLIPVisionModel", "CLIPVisionConfig", _VISION, "mlp", "gelu_quick", vision=True),
    "deepseek": Entry(
        "DeepseekV3Model",
        "DeepseekV3Config",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "first_k_dense_replace": LAYERS,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        "gated_mlp",
        "silu",
    ),
    "glm4": Entry("Glm4Model", "Glm4Config", {**_DECODER, "head_dim": 16}, "gated_mlp", "silu"),
    "mobilebert": Entry(
        "MobileBertModel",
        "MobileBertConfig",
        {
            **_TEXT,
            **_SIZES,
            "embedding_size": 32,
            "intra_bottleneck_size": 32,
            "true_hidden_size": 32,
            "num_feedforward_networks": 2,
        },
        "mlp",
        "relu",
        mlps=2 * LAYERS,
    ),
    "dinov2": Entry(
        "Dinov2Model",
        "Dinov2Config",
        {
            "hidden_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "use_swiglu_ffn": True,
        },
        "gated_mlp",
        "silu",
        vision=True,
    ),
    "convnext": Entry(
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "image_size": 16},
        "mlp",
        "gelu",
        vision=True,
    ),
    "nemotron": Entry("NemotronModel", "NemotronConfig", _DECODER, "mlp", "relu2"),
}

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def exportable(name: str, exporter: str, dtype: str = "fp32") -> bool:
    """Whether the exporter makes a valid model of it."""
    if name.startswith("t5"):
        return exporter == "torchscript"  # the bias of relative positions does not export with dynamic sizes
    if name == "glm4":
        return exporter == "dynamo"  # TorchScript: "All tensors must have the same rank"
    if exporter == "torchscript" and dtype == "bf16":
        return name == "gemma2"  # the others: "ScalarType ComplexDouble is an unexpected tensor scalar type"
    # TorchScript multiplies in float32 there and leaves a LayerNormalization of two types, which nothing loads.
    return not (exporter == "torchscript" and dtype == "fp16" and name in ("bert", "modernbert"))


class _Wrapper(torch.nn.Module):
    """One tensor in, one tensor out, no cache."""

    def __init__(self, model: torch.nn.Module, vision: bool) -> None:
        super().__init__()
        self.model = model
        self.vision = vision
        self.cached = hasattr(model.config, "use_cache")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.vision:
            return self.model(pixel_values=x)[0]
        # Without a mask, transformers looks for packed sequences, with operators that TorchScript cannot export.
        mask = torch.ones_like(x)
        return self.model(input_ids=x, attention_mask=mask, **({"use_cache": False} if self.cached else {}))[0]


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
    """The model, and a function that draws an input for a seed."""
    return wrapped(ZOO[name], instance(ZOO[name], seed), dtype)


def instance(entry: Entry, seed: int) -> torch.nn.Module:
    """The model of an entry, with random parameters."""
    import transformers

    torch.manual_seed(seed)
    model: torch.nn.Module = getattr(transformers, entry.model)(getattr(transformers, entry.config)(**entry.arguments))
    for parameter in model.parameters():  # initial biases and norms are all alike
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    return model


def wrapped(
    entry: Entry, model: torch.nn.Module, dtype: torch.dtype
) -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
    """`model` from one tensor to one tensor, and a function that draws an input for a seed."""

    def draw(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        if entry.vision:
            return torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float32).to(dtype)
        return torch.randint(3, 96, (2, 7), generator=generator)

    return _Wrapper(model, entry.vision).eval().to(dtype), draw


def export(model: torch.nn.Module, example: torch.Tensor, path: Path, exporter: str, opset: int | None = None) -> None:
    """Exports with `exporter`, "dynamo" or "torchscript"; text models with dynamic batch and sequence."""
    axes = {0: "batch"} if example.is_floating_point() else {0: "batch", 1: "sequence"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            options: dict[str, Any] = {} if opset is None else {"opset_version": opset}
            if exporter == "dynamo":
                dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
                options |= {"dynamic_shapes": (dims,), "verbose": False}
            else:
                options = {"opset_version": 17, "dynamic_axes": {"x": axes}} | options
            dynamo = exporter == "dynamo"
            torch.onnx.export(model, (example,), path, input_names=["x"], output_names=["y"], dynamo=dynamo, **options)
        finally:
            logging.disable(logging.NOTSET)
