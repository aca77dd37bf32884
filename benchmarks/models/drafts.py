"""Drafts: what each drafter brings to the trained models, and what a step that verifies one costs.

    python -m benchmarks.models.drafts [--models DIR] [--out benchmarks/results/models/drafts.json]

The trained models of tests/trained_models draft by nothing, by n-grams, by their trained head and by the other trained
model, which has the same tokenizer and about their size. On a GPU NVFP4 with plugins and torch, on a CPU the exported
models in ONNX Runtime. Tokens per second behind the first token, the median of rounds in turns; acceptance by place;
whether each text is the one without drafts, and where it is not, how far apart the two tokens' logits are.
A head is small beside a model of many layers: `--layers 36` appends layers that add nothing to the trained ones, so
that the text, and what drafters know of it, stays. `--export-only` makes the models in `--models` without a GPU; a run
with the same folder takes them from there.

On a GPU also steps of 1 to 16 tokens of published shapes with random weights, as benchmarks.kernels.decoder times one
token, and of one layer with the head, which is what a trained head is.
"""

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import HERE, command, environment, plugin_host, record
from benchmarks.kernels.decoder import whole
from benchmarks.kernels.decoder_parts import SHAPES, Model, Step, composed, one_launch
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.drafts.drafter import DraftStatistics
from trt_nvfp4.builder.generate.open import RunnerName, open_runner
from trt_nvfp4.builder.pipeline import drafter_build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.plugins.host import PluginHost

sys.path.insert(0, str(HERE.parent / "tests"))
from trained_heads import HEADS, directory, prompts

#: More positions than the models were trained for: what is compared is speed, and texts with each other.
CAPACITY = 1024
PROMPTS, PROMPT, REPEATS = 10, 24, 4
BATCHES = (1, 4)
#: Workload -> (how often a prompt holds its text, options of generate). Drawn text hardly repeats itself.
WORKLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "drawn": (1, {"temperature": 1.0, "seed": 0}),
    "repeated prompt": (REPEATS, {}),
}
VERIFIED, WIDTHS, CACHED = ("Qwen3-8B", "Qwen3-0.6B"), (1, 2, 4, 8, 16), 1024


def export(folder: Path, target: str, layers: int | None = None) -> None:
    """The models and their heads in `folder`, as they are and quantized, unless they are there."""
    for head in HEADS:
        if not (folder / f"{head}.draft.rewritten.onnx").is_file():
            source, draft = directory(head, folder, CAPACITY, layers)
            request = Request(
                source,
                find_target(target),
                output=folder / f"{head}.engine",
                task="generate",
                stop_after="rewrite",
                cache_capacity=CAPACITY,
                max_batch=max(BATCHES),
                draft=draft,
            )
            drafter_build.run(request)


@dataclass
class Measured:
    """One drafter's runs of one workload: rates by round, the texts, and what became of drafts in one round."""

    rates: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    drafts: DraftStatistics = field(default_factory=DraftStatistics)

    def run(self, generator: Generator, texts: Sequence[list[int]], batch: int, how: dict[str, Any]) -> None:
        """All texts, `batch` at a time."""
        self.texts, self.drafts = [], DraftStatistics()
        tokens, seconds = 0, 0.0
        for begin in range(0, len(texts), batch):
            given = texts[begin : begin + batch]
            result = generator.generate(given, stop=(), **how)
            self.texts += [generation.token_ids for generation in result.generations]
            assert result.timings.tokens_per_s is not None
            tokens += result.timings.tokens - len(given)
            seconds += (result.timings.tokens - len(given)) / result.timings.tokens_per_s
            found = result.timings.drafts
            self.drafts.steps += found.steps
            for place, (drafted, accepted) in enumerate(found.by_position):
                if place == len(self.drafts.by_position):
                    self.drafts.by_position.append([0, 0])
                self.drafts.by_position[place][0] += drafted
                self.drafts.by_position[place][1] += accepted
        self.rates.append(tokens / seconds)


def in_turns(
    generators: dict[str, Generator], texts: Sequence[list[int]], batch: int, how: dict[str, Any], rounds: int
) -> dict[str, Measured]:
    """Every drafter once a round, behind one that warms up."""
    found = {name: Measured() for name in generators}
    for _ in range(1 + rounds):
        for name, generator in generators.items():
            found[name].run(generator, texts, batch, how)
    for measured in found.values():
        del measured.rates[0]
    return found


def differences(model: Path, runner: RunnerName, found: Measured, plain: Measured, texts: Sequence[list[int]]) -> Any:
    """Where a text leaves the one without drafts: the prompt, the place, and by how much the model's logits of the two
    tokens differ there, beside the step from its largest to its second."""
    ends = []
    for number, (tokens, expected) in enumerate(zip(found.texts, plain.texts, strict=True)):
        if tokens != expected:
            place = next(at for at, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1])
            opened = open_runner(model, runner=runner)
            before = np.array([[*texts[number], *expected[:place]]])
            opened.start(1)
            logits = opened.step(before, np.zeros(1, np.int64), np.array(before.shape[1:])).host()[0]
            gap = abs(float(logits[tokens[place]] - logits[expected[place]]))
            ends.append({"prompt": number, "place": place, "logit_gap": gap, "spread": float(logits.std())})
            opened.close()
    return ends


def measure_texts(
    folder: Path,
    workloads: Sequence[str],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    result: dict[str, Any],
    out: Path,
) -> None:
    """Every trained model, workload, batch and drafter; the record is written after each workload."""
    runner: RunnerName = "torch" if torch.cuda.is_available() else "onnxruntime"
    suffix = ".rewritten.onnx" if runner == "torch" else ".onnx"
    files = {head: folder / f"{head}{suffix}" for head in HEADS}
    for head, other in zip(HEADS, reversed(HEADS), strict=True):
        drafts = {
            "none": "none",
            "ngram": "ngram",
            "head": folder / f"{head}.draft{suffix}",
            "the other model": files[other],
        }
        with ExitStack() as made:
            generators = {
                name: made.enter_context(Generator(files[head], runner=runner, draft=draft))
                for name, draft in drafts.items()
            }
            for workload in workloads:
                repeats, how = WORKLOADS[workload]
                texts = [text[number:] * repeats for number, text in enumerate(prompts(PROMPTS, PROMPT))]
                for batch in batches:
                    texts = texts[: len(texts) // batch * batch]  # recorded steps are of one batch
                    found = in_turns(generators, texts, batch, how | {"max_new_tokens": tokens}, rounds)
                    for name, measured in found.items():
                        run = {
                            "model": HEADS[head],
                            "head": head,
                            "workload": workload,
                            "batch": batch,
                            "drafts": name,
                            "tokens": sum(map(len, measured.texts)),
                            "tokens_per_s": statistics.median(measured.rates),
                            "range_tokens_per_s": [min(measured.rates), max(measured.rates)],
                            "steps": measured.drafts.steps,
                            "by_position": measured.drafts.by_position,
                            "different": differences(files[head], runner, measured, found["none"], texts),
                        }
                        result["texts"].append(run)
                        rate = run["tokens_per_s"] / statistics.median(found["none"].rates)
                        print(
                            f"{HEADS[head]}, {workload}, batch {batch}, {name}: {run['tokens_per_s']:.0f} tokens/s "
                            f"({rate:.2f}x), {run['tokens']} tokens in {run['steps']} steps, "
                            f"{len(run['different'])} texts differ"
                        )
                    record(out, result)


def measure_steps(host: PluginHost, name: str, rounds: int) -> dict[str, Any]:
    """Microseconds of one sequence's step by its tokens, as parts and in one launch, and of one layer with the head."""
    model, device = Model.random(SHAPES[name], torch.bfloat16), CudaDevice()
    contestants: dict[str, Work] = {}
    for tokens in WIDTHS:
        step = Step.random(model, 1, CACHED, fp8=False, tokens=tokens)
        contestants[f"parts, {tokens}"] = whole(composed(host, model, step)[0])
        if (launch := one_launch(host, model, step)) is not None:
            contestants[f"one launch, {tokens}"] = whole(launch[0])
    head = Model(replace(model.shape, layers=1), model.dtype, model.layers[:1], model.head)
    contestants["one layer and head, 1"] = whole(composed(host, head, Step.random(head, 1, CACHED, fp8=False))[0])
    timings = interleave(device, contestants, rounds)
    for contestant, timing in timings.items():
        print(f"{name}, {contestant} tokens: {timing.median_us:.0f} us")
    return {"model": name, "cached": CACHED, "timings": {key: asdict(timing) for key, timing in timings.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--layers", type=int, help="of the models, those behind their own adding nothing")
    parser.add_argument("--new-tokens", type=int, default=512, help="of each text")
    parser.add_argument("--rounds", type=int, default=3, help="of each text")
    parser.add_argument("--target", default="h200", help="what the plans are made for")
    parser.add_argument("--models", type=Path, help="folder for the ONNX models (default: a scratch folder)")
    parser.add_argument("--export-only", action="store_true", help="make them and measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "drafts.json")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = given.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export(folder, given.target, given.layers)
        if given.export_only:
            return
        on_gpu = torch.cuda.is_available()
        about = environment() if on_gpu else {"cpu": cpu(), "torch": torch.__version__, "command": command()}
        result: dict[str, Any] = {
            "environment": about,
            "capacity": CAPACITY,
            "layers": given.layers,
            "prompt": PROMPT,
            "steps": [],
            "texts": [],
        }
        if on_gpu:
            host = plugin_host()
            for name in VERIFIED:
                result["steps"].append(measure_steps(host, name, 15))
                record(given.out, result)
                gc.collect()
                torch.cuda.empty_cache()
                torch.compiler.reset()
        measure_texts(folder, given.workloads, given.batches, given.new_tokens, given.rounds, result, given.out)


def cpu() -> str:
    """The name of this machine's processor in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
