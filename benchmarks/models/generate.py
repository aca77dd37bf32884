"""Text generation without TensorRT: a decoder by the plugins and torch, beside transformers in BF16.

    python -m benchmarks.models.generate [--models DIR] [--out benchmarks/results/models/generate.json]

A language model of eight layers of Qwen3-0.6B's shape with random weights is exported with its caches and quantized as
build-engine does it; `generate --runner torch` runs the quantized and the unquantized ONNX model, transformers the
model itself with a static cache, which compiles its decode steps. All in BF16, greedy, the same prompts. Milliseconds
to the first token, and tokens per second behind it; the median of several runs. Both choose tokens on the GPU.
`--export-only` makes the ONNX models in `--models` without a GPU; a run with the same folder takes them from there.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.harness import HERE, environment, record
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target

CAPACITY, PROMPT, NEW = 1024, 512, 128
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
UNQUANTIZED, QUANTIZED = "m.onnx", "m.rewritten.onnx"
Run = Callable[[list[list[int]]], tuple[float, float]]


def exported(folder: Path, target: str, max_batch: int, layers: int = SHAPE["num_hidden_layers"]) -> Any:
    """transformers' model; its ONNX models are in `folder`, as it is and quantized, made there unless they were."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SHAPE, "num_hidden_layers": layers})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not (folder / QUANTIZED).is_file():
        model.save_pretrained(folder / "hf")
        request = pipeline.Request(
            folder / "hf",
            find_target(target),
            output=folder / "m.engine",
            task="generate",
            stop_after="rewrite",
            cache_capacity=CAPACITY,
            max_batch=max_batch,
            recipe="max",  # of random weights: the quickest
        )
        pipeline.run(request)
    return model


def timed(generator: Generator) -> Run:
    def run(prompts: list[list[int]]) -> tuple[float, float]:
        timings = generator.generate(prompts, max_new_tokens=NEW, stop=()).timings
        assert timings.tokens_per_s is not None
        return timings.first_token_s, timings.tokens_per_s

    return run


def by_transformers(model: Any) -> Run:
    """transformers' own generate with a static cache, which compiles its decode steps (CUDA graphs)."""

    def seconds(ids: torch.Tensor, tokens: int) -> float:
        begun = time.perf_counter()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **options).cpu()
        return time.perf_counter() - begun

    def run(prompts: list[list[int]]) -> tuple[float, float]:
        ids = torch.tensor(prompts, device="cuda")
        first = seconds(ids, 1)
        return first, (NEW - 1) * len(prompts) / (seconds(ids, NEW) - first)

    return run


def measured(name: str, run: Run, batch: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SHAPE["vocab_size"], PROMPT).tolist() for _ in range(batch)]
    run(prompts)
    run(prompts)
    first, rate = zip(*(run(prompts) for _ in range(rounds)), strict=True)
    found = {
        "contestant": name,
        "batch": batch,
        "first_token_ms": statistics.median(first) * 1e3,
        "tokens_per_s": statistics.median(rate),
        "range_tokens_per_s": [min(rate), max(rate)],
    }
    print(f"{name:38s} batch {batch}: first {found['first_token_ms']:7.1f} ms, {found['tokens_per_s']:8.1f} tokens/s")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="h200", help="what the plan is made for")
    parser.add_argument("--models", type=Path, help="folder for the ONNX models (default: a scratch folder)")
    parser.add_argument("--export-only", action="store_true", help="make them and measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "generate.json")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = given.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = exported(folder, given.target, max(given.batches))
        if not given.export_only:
            measure(model, folder, given.batches, given.rounds, given.out)


def measure(model: Any, folder: Path, batches: Sequence[int], rounds: int, out: Path) -> None:
    """Every contestant at every batch; the record is written after each."""
    result: dict[str, Any] = {
        "environment": {**environment(), "transformers": transformers.__version__},
        "model": SHAPE,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "capacity": CAPACITY,
        "runs": [],
    }

    def note(name: str, run: Run) -> None:
        for batch in batches:
            result["runs"].append(measured(name, run, batch, rounds))
            record(out, result)

    for title, file in (("NVFP4, plugins and torch", QUANTIZED), ("BF16, torch", UNQUANTIZED)):
        with Generator(folder / file, runner="torch") as generator:
            note(title, timed(generator))
        gc.collect()
        torch.cuda.empty_cache()
    note("BF16, transformers, static cache", by_transformers(model.cuda().eval()))


if __name__ == "__main__":
    main()
