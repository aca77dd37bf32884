"""The trained models with their trained heads (see trained_models/README.md), exported, and prompts for them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from trt_nvfp4.builder.export.huggingface import export, export_head
from trt_nvfp4.builder.model.decoder_contract import AUTO, CacheOptions

TRAINED = Path(__file__).parent / "trained_models"
#: The positions that the models know.
CAPACITY = 256
#: The model of each head.
HEADS = {"eagle3": "llama", "mtp": "qwen3_moe"}


def directory(head: str, folder: Path, positions: int = CAPACITY, layers: int | None = None) -> tuple[Path, str]:
    """The Hugging Face directory of a head's model, made in `folder`, and its --draft. `positions` may be more than the
    model was trained for. `layers`: so many, of which those behind its own add nothing, as to be a deeper model of the
    same text."""
    made = _copied(HEADS[head], folder, positions)
    if layers is not None:
        _deepen(made, layers)
    if head == "eagle3":
        return made, str(_copied("llama_eagle3", folder, positions))
    shutil.copy(TRAINED / "qwen3_moe_mtp" / "mtp.safetensors", made)
    files: dict[str, str] = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        with safe_open(made / name, "numpy") as tensors:
            files |= dict.fromkeys(tensors.keys(), name)
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return made, AUTO


def _copied(name: str, folder: Path, positions: int) -> Path:
    made = folder / name
    shutil.copytree(TRAINED / name, made, dirs_exist_ok=True)
    _configure(made, max_position_embeddings=positions)
    return made


def _configure(directory: Path, **changed: int) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def _deepen(directory: Path, layers: int) -> None:
    """Append copies of the last layer whose attention and MLP give zeros."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    own = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    last = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{own - 1}.")}
    for layer in range(own, layers):
        for name, tensor in last.items():
            gives = name.endswith(("o_proj.weight", "down_proj.weight"))
            added = torch.zeros_like(tensor) if gives else tensor.clone()
            tensors[name.replace(f".{own - 1}.", f".{layer}.", 1)] = added
    save_file(tensors, file, {"format": "pt"})
    _configure(directory, num_hidden_layers=layers)


def exported(head: str, folder: Path) -> Path:
    """The model's ONNX file in `folder`, with its head beside it; they are made unless they are there."""
    model = folder / f"{head}.onnx"
    if not model.with_suffix(".draft.onnx").is_file():
        source, draft = directory(head, folder)
        cache = CacheOptions(CAPACITY, max_batch=4, draft=draft)
        export(source, model, "generate", cache)
        export_head(source, model.with_suffix(".draft.onnx"), cache)
    return model


def prompts(count: int = 10, length: int = 24) -> list[list[int]]:
    """Token ids of the held-out text, from places far apart."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TRAINED / "llama")
    tokens = tokenizer.encode((TRAINED / "text" / "held_out.txt").read_text())
    step = len(tokens) // count
    return [tokens[number * step : number * step + length] for number in range(count)]
