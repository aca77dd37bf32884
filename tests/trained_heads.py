"""The trained models with their trained heads (see trained_models/README.md), exported, and prompts for them."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from trt_nvfp4.builder.export.huggingface import export, export_head
from trt_nvfp4.builder.model.decoder_contract import AUTO, CacheOptions

TRAINED = Path(__file__).parent / "trained_models"
#: The positions that the models know.
CAPACITY = 256
#: The model of each head.
HEADS = {"eagle3": "llama", "mtp": "qwen3_moe"}


def directory(head: str, folder: Path) -> tuple[Path, str]:
    """The Hugging Face directory of a head's model, made in `folder` where head and model are one, and its --draft."""
    source = TRAINED / HEADS[head]
    if head == "eagle3":
        return source, str(TRAINED / "llama_eagle3")
    made = folder / "qwen3_moe"
    shutil.copytree(source, made, dirs_exist_ok=True)
    shutil.copy(TRAINED / "qwen3_moe_mtp" / "mtp.safetensors", made)
    files: dict[str, str] = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        with safe_open(made / name, "numpy") as tensors:
            files |= dict.fromkeys(tensors.keys(), name)
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return made, AUTO


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
