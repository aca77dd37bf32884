"""How a decoder agrees with another over its caches: prompts, then steps on the reference's own tokens."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.loop import advance, check, prefill
from trt_nvfp4.builder.generate.open import RunnerName, opened, tokenizer_folder
from trt_nvfp4.builder.generate.runner import Runner
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.records.contents import DecodingAgreement
from trt_nvfp4.common.metrics import kl_divergence

#: Random prompts: how many, and their shortest and longest length in tokens.
DRAWN, SHORTEST, LONGEST = 3, 4, 24


@dataclass(frozen=True)
class Step:
    """One generated token of every prompt; step 0 is the one behind the prompt.

    `kl`: mean of KL(softmax of the reference || softmax), in nats; `kl_worst`: of the worst prompt; `top1`: share of
    prompts whose likeliest token is the same.
    """

    step: int
    kl: float
    kl_worst: float
    top1: float


@dataclass
class DecodingComparison:
    """All steps of one comparison over `prompts` prompts; `names`: the runners of the reference and the result."""

    names: tuple[str, str]
    prompts: int
    steps: list[Step] = field(default_factory=list)

    @property
    def kl(self) -> float:
        """Mean over all steps and prompts."""
        return float(np.mean([step.kl for step in self.steps]))

    @property
    def top1(self) -> float:
        """Share of the tokens that are the same, over all steps and prompts."""
        return float(np.mean([step.top1 for step in self.steps]))

    def as_dict(self) -> DecodingAgreement:
        return {
            "reference": self.names[0],
            "result": self.names[1],
            "prompts": self.prompts,
            "kl": self.kl,
            "top1": self.top1,
            "steps": [
                {"step": step.step, "kl": step.kl, "kl_worst": step.kl_worst, "top1": step.top1} for step in self.steps
            ],
        }


def compare_decoding(
    reference: Path,
    result: Path,
    steps: int,
    prompts: Sequence[str | Sequence[int]] = (),
    count: int = DRAWN,
    seed: int = 0,
    runner: RunnerName = "auto",
) -> DecodingComparison:
    """Agreement of two decoders: engines, bundles, ONNX models or Hugging Face directories.

    Both take the same text: the prompts, and behind them the likeliest tokens by the reference, so that a difference is
    of this step and not of an earlier one. `prompts` are text or token ids; without any, `count` random ones of
    different lengths are drawn. `runner` runs the result. Raises BuilderError: usage for prompts or steps
    that one of the two cannot take, or as `open_runner`.
    """
    if not prompts and count < 1:
        raise UsageError(f"count {count}: expected prompts, or 1 or more random ones")
    with ExitStack() as made:
        (first, file), (second, other) = (opened(reference, made), opened(result, made, runner=runner))
        if first.decoder.vocab_size != second.decoder.vocab_size:
            sizes = f"{first.decoder.vocab_size} tokens in {reference}, {second.decoder.vocab_size} in {result}"
            raise UsageError(f"not the same model: {sizes}")
        texts = _ids(prompts, [tokenizer_folder(file), tokenizer_folder(other)]) or _drawn(
            first, second, steps, count, seed
        )
        found = DecodingComparison((first.name, second.name), len(texts))
        most = min(first.decoder.max_batch, second.decoder.max_batch)
        batches = [texts[start : start + most] for start in range(0, len(texts), most)]
        rows = [_decode(first, second, batch, steps) for batch in batches]
        for number, parts in enumerate(zip(*rows, strict=True)):
            kl = np.concatenate([part[0] for part in parts])
            same = np.concatenate([part[1] for part in parts])
            found.steps.append(Step(number, float(kl.mean()), float(kl.max()), float(same.mean())))
        return found


def _decode(first: Runner, second: Runner, texts: list[list[int]], steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per step: KL of each prompt, and whether its likeliest token is the same."""
    for runner in (first, second):
        check(runner, texts, 1)
        longest = max(map(len, texts)) + steps - 1
        if longest > runner.decoder.capacity:
            raise UsageError(
                f"{runner.name}: the longest prompt and {steps} steps are {longest} tokens, but the caches hold "
                f"{runner.decoder.capacity}; ask for fewer --steps, or give shorter prompts"
            )
        runner.start(len(texts))
    rows = [list(text) for text in texts]
    running = list(range(len(rows)))
    expected, actual = prefill(first, rows).host(), prefill(second, rows).host()
    found = []
    for step in range(steps):
        pairs = zip(np.float64(expected), np.float64(actual), strict=True)
        kl = np.array([kl_divergence(x, y) for x, y in pairs])
        chosen = expected.argmax(-1)
        found.append((kl, chosen == actual.argmax(-1)))
        if step == steps - 1:
            break
        for row, token in zip(rows, chosen, strict=True):
            row.append(int(token))
        expected, actual = advance(first, rows, running).host(), advance(second, rows, running).host()
    return found


def _ids(prompts: Sequence[str | Sequence[int]], folders: Sequence[Path]) -> list[list[int]]:
    """Token ids of the prompts, by the first tokenizer that is there."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    tokenizer = Tokenizer(folder) if texts else None
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            assert tokenizer is not None
            ids.append(tokenizer.encode(prompt))
        else:
            ids.append(list(prompt))
    return ids


def _drawn(first: Runner, second: Runner, steps: int, count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    room = min(first.decoder.capacity, second.decoder.capacity) - steps + 1
    longest = max(1, min(LONGEST, room))
    lengths = rng.integers(min(SHORTEST, longest), longest + 1, count)
    return [rng.integers(0, first.decoder.vocab_size, length).tolist() for length in lengths]


def table(found: DecodingComparison) -> Table:
    """Steps for the terminal: the first ones, and then ever more of them in one row."""
    shown = Table(title=f"{found.names[1]} against {found.names[0]} ({found.prompts} prompts)", title_justify="left")
    for heading in ("steps", "KL mean", "KL worst", "same token"):
        shown.add_column(heading, justify="right")
    start, width = 0, 1
    while start < len(found.steps):
        part = found.steps[start : start + width]
        name = str(part[0].step) if len(part) == 1 else f"{part[0].step}-{part[-1].step}"
        kl, top1 = np.mean([step.kl for step in part]), np.mean([step.top1 for step in part])
        shown.add_row(name, f"{kl:.4g}", f"{max(step.kl_worst for step in part):.4g}", f"{top1:.1%}")
        start, width = start + width, width if start + width < 4 else 2 * width
    shown.add_row("all", f"{found.kl:.4g}", f"{max(step.kl_worst for step in found.steps):.4g}", f"{found.top1:.1%}")
    return shown
