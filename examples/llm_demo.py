"""A trained language model to a verified engine for RTX Blackwell, and to text, without a GPU.

The small Llama of tests/trained_models is exported with key-value caches, quantized and built as one engine with two
profiles, prefill and decode. ONNX Runtime then generates ten tokens with the unquantized export, which must be
transformers' own greedy tokens, and with the quantized model. Everything lands in ./demo-output/llm.
"""

import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import trt_nvfp4

MODELS = Path(__file__).resolve().parents[1] / "tests" / "trained_models"
OUTPUT = Path("demo-output") / "llm"
TARGET = "rtx-blackwell"
PROMPT = "Return a new list of the"
NEW_TOKENS = 10
PERPLEXITY_TOKENS = 1000


def perplexity(model: Path, tokens: list[int]) -> float:
    """Per token, over windows of what the caches of the decoder `model` hold, all in one batch."""
    graph = onnx.load(model, load_external_data=False).graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    caches = {name: shape[1:] for name, shape in shapes.items() if name.startswith("past_key_values.")}
    capacity = next(iter(caches.values()))[1]
    windows = [tokens[start : start + capacity + 1] for start in range(0, len(tokens) - 1, capacity)]
    lengths = np.array([len(window) - 1 for window in windows])
    ids = np.zeros((len(windows), capacity), np.int64)  # windows are padded on the right
    for row, window in zip(ids, windows, strict=True):
        row[: len(window) - 1] = window[:-1]
    empty = {name: np.zeros((len(windows), *shape), np.float32) for name, shape in caches.items()}
    inputs = {"input_ids": ids, "past_length": np.zeros_like(lengths), "new_length": lengths}
    logits = torch.from_numpy(trt_nvfp4.run(model, {**inputs, **empty})["logits"])
    losses = [
        torch.nn.functional.cross_entropy(row[: len(window) - 1], torch.tensor(window[1:]), reduction="none")
        for row, window in zip(logits, windows, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


def main() -> None:
    # Notes of packages that transformers imports where they are installed, and its own progress bars.
    for package in ("torchao", "torch.utils._pytree"):
        logging.getLogger(package).setLevel(logging.ERROR)
    disable_progress_bar()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    directory = MODELS / "llama"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wide = OUTPUT / "llama-float32"
    model.save_pretrained(wide)
    tokenizer.save_pretrained(wide)
    with trt_nvfp4.ProgressBar() as progress:
        built = trt_nvfp4.build(
            directory, target=TARGET, output=OUTPUT / "llama.engine", task="generate", progress=progress
        )
        # In float32, with the logits of all tokens: for the perplexity.
        files = trt_nvfp4.rewrite(
            wide,
            target=TARGET,
            output=OUTPUT / "wide.engine",
            task="generate",
            all_logits=True,
            activations="keep",
            progress=progress,
        ).files
    prompt = tokenizer(PROMPT)["input_ids"]
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = generated[0, len(prompt) :].tolist()
    held_out = tokenizer((MODELS / "text" / "held_out.txt").read_text())["input_ids"][:PERPLEXITY_TOKENS]

    table = Table(title=f"{NEW_TOKENS} tokens after {PROMPT!r}, greedy", title_justify="left")
    for column in ("", "text", "perplexity"):
        table.add_column(column)
    table.add_row("transformers, float32", tokenizer.decode(expected), "")
    found = {}
    for name in ("exported model", "rewritten model"):
        with trt_nvfp4.Generator(files[name]) as generator:
            (found[name],) = generator.generate([prompt], max_new_tokens=NEW_TOKENS, stop=()).generations
        title = "ONNX Runtime, " + ("unquantized" if name == "exported model" else "NVFP4")
        tokens = found[name].token_ids
        table.add_row(title, tokenizer.decode(tokens), f"{perplexity(files[name], held_out):.2f}")
    console = Console(markup=False)
    console.print(table)
    report = built.report
    console.print(
        f"{built.engine}: {decimal(report.engine_bytes or 0)}, {report.plugin_layers} plugin layers, two profiles, "
        f"{report.caches_in_place} caches updated in place"
    )
    if found["exported model"].token_ids[: len(expected)] != expected:
        sys.exit("ONNX Runtime generated other tokens than transformers")


if __name__ == "__main__":
    try:
        main()
    except (trt_nvfp4.TrtNvfp4Error, OSError) as error:
        sys.exit(f"error: {error}")
