"""A trained language model to a verified engine for RTX Blackwell, and to text, without a GPU.

The small Llama of tests/trained_models is exported with key-value caches, quantized and built as one engine with two
profiles, prefill and decode. ONNX Runtime then generates ten tokens with the unquantized export, which must be
transformers' own greedy tokens, and with the quantized model. Everything lands in ./demo-output/llm.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from rich.filesize import decimal
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from trt_nvfp4.builder.cli.console import ProgressBar, failures, output
from trt_nvfp4.builder.export.decoder_contract import Decoder, decoder_of
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target

MODELS = Path(__file__).resolve().parents[1] / "tests" / "trained_models"
OUTPUT = Path("demo-output") / "llm"
PROMPT = "Return a new list of the"
NEW_TOKENS = 10
PERPLEXITY_TOKENS = 1000


class CachedModel:
    """A language model with caches in ONNX Runtime, one sequence at a time; logits of all tokens, float32."""

    def __init__(self, path: Path) -> None:
        found = decoder_of(onnx.load(path, load_external_data=False))
        assert found is not None, f"{path} has caches"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # a note for every cache that it copies
        self.decoder: Decoder = found
        self._session = onnxruntime.InferenceSession(path, options)
        self.clear()

    def clear(self) -> None:
        """Forget the sequence."""
        shapes = zip(self.decoder.kv_heads, self.decoder.head_dim, self.decoder.value_head_dim, strict=True)
        empty = [
            np.zeros((1, heads, self.decoder.capacity, dim), np.float32) for heads, *dims in shapes for dim in dims
        ]
        self._caches, self._length = dict(zip(self.decoder.caches, empty, strict=True)), 0

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Logits [tokens, vocabulary] of tokens that continue the sequence."""
        lengths = {"past_length": np.array([self._length]), "new_length": np.array([len(tokens)])}
        logits, *present = self._session.run(None, {"input_ids": np.array([tokens]), **lengths, **self._caches})
        self._caches, self._length = dict(zip(self.decoder.caches, present, strict=True)), self._length + len(tokens)
        return np.asarray(logits[0])

    def greedy(self, prompt: list[int]) -> list[int]:
        self.clear()
        found: list[int] = []
        for _ in range(NEW_TOKENS):
            found.append(int(self.logits([found[-1]] if found else prompt)[-1].argmax()))
        return found

    def perplexity(self, tokens: list[int]) -> float:
        """Per token, over windows of the caches' capacity."""
        losses = []
        for start in range(0, len(tokens) - 1, self.decoder.capacity):
            window = tokens[start : start + self.decoder.capacity + 1]
            self.clear()
            logits = torch.from_numpy(self.logits(window[:-1]))
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
        return float(torch.cat(losses).mean().exp())


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    directory, target = MODELS / "llama", find_target("rtx-blackwell")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wide = OUTPUT / "llama-float32"
    model.save_pretrained(wide)
    tokenizer.save_pretrained(wide)
    with failures(debug=False, as_json=False), ProgressBar() as progress:
        engine = pipeline.Request(directory, target, output=OUTPUT / "llama.engine", task="generate")
        report = json.loads(pipeline.run(engine, progress).json())
        # ONNX Runtime has no BF16 on a CPU.
        both = pipeline.Request(
            wide,
            target,
            output=OUTPUT / "wide.engine",
            task="generate",
            all_logits=True,
            activations="keep",
            stop_after="rewrite",
        )
        pipeline.run(both, progress)
    original, quantized = CachedModel(OUTPUT / "wide.onnx"), CachedModel(OUTPUT / "wide.rewritten.onnx")
    prompt = tokenizer(PROMPT)["input_ids"]
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = generated[0, len(prompt) :].tolist()
    found = original.greedy(prompt)
    held_out = tokenizer((MODELS / "text" / "held_out.txt").read_text())["input_ids"][:PERPLEXITY_TOKENS]

    table = Table(title=f"{NEW_TOKENS} tokens after {PROMPT!r}, greedy", title_justify="left")
    for column in ("", "text", "perplexity"):
        table.add_column(column)
    table.add_row("transformers, float32", tokenizer.decode(expected), "")
    for name, tokens, runner in (
        ("ONNX Runtime, unquantized", found, original),
        ("ONNX Runtime, NVFP4", quantized.greedy(prompt), quantized),
    ):
        table.add_row(name, tokenizer.decode(tokens), f"{runner.perplexity(held_out):.2f}")
    output.print(table)
    output.print(
        f"{report['engine']}: {decimal(report['engine_bytes'])}, {report['plugin_layers']} plugin layers, two "
        f"profiles, {report['caches_in_place']} caches updated in place"
    )
    if found[: len(expected)] != expected:
        sys.exit("ONNX Runtime generated other tokens than transformers")


if __name__ == "__main__":
    main()
