"""Many users of one decoder: `trt-nvfp4 serve` beside `generate` with fixed batches of as many prompts.

    python -m benchmarks.models.serving --models DIR [--out benchmarks/results/models/serving.json]

The model is of Qwen3-0.6B's shape, in NVFP4, with random weights; `--model FILE --tokenizer DIR` serves another.
Clients are processes of their own that stream greedy tokens by HTTP, each asking again when it has its answer; all
prompts differ. Three contestants continue the same prompts: the server, its scheduler without HTTP, and `generate` with
fixed batches, none with drafts; the first two have a slot for each client. With eight clients, then the time to the
first token of requests that come beside seven running ones.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import HERE, command, environment, record
from benchmarks.models.server import Answer, metrics, one_after_another, served, streamed
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.open import opened
from trt_nvfp4.builder.serve.fair_queue import FairQueue
from trt_nvfp4.builder.serve.request import Generated, Request
from trt_nvfp4.builder.serve.scheduler import Scheduler, Told

RUNNING = 7
Prompts = list[list[int]]


def words(folder: Path, vocabulary: int) -> Path:
    """A tokenizer with a word for each token."""
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(vocabulary)}, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


class Contest:
    """The prompts that all contestants continue: `rounds` of them for each number of clients."""

    def __init__(self, capacity: int, vocabulary: int, rounds: int) -> None:
        self.prompt, self.new, self.rounds = capacity // 2, capacity // 8, rounds
        self.capacity, self._vocabulary, self._rng = capacity, vocabulary, np.random.default_rng(0)

    def prompts(self, count: int, length: int | None = None) -> Prompts:
        found: Prompts = self._rng.integers(0, self._vocabulary, (count, length or self.prompt)).tolist()
        return found

    def measured(self, name: str, clients: int, run: Callable[[list[Prompts]], dict[str, float]]) -> dict[str, Any]:
        """Two rounds to warm up, then all; `run` gets a list of prompts for each round."""
        run([self.prompts(clients) for _ in range(2)])
        rounds = [self.prompts(clients) for _ in range(self.rounds)]
        begun = time.perf_counter()
        found = run(rounds)
        rate = clients * self.rounds * self.new / (time.perf_counter() - begun)
        found = {"contestant": name, "clients": clients, "tokens_per_s": rate, **found}
        print(
            "  ".join(f"{key} {value:.5g}" if isinstance(value, float) else str(value) for key, value in found.items())
        )
        return found


def of_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """`decode_tokens_per_s`: behind the first token, of all clients together, as Generator counts them."""
    gaps = [gap for answer in answers for gap in np.diff(answer.tokens)]
    return {
        "first_token_ms": 1e3 * statistics.median(answer.tokens[0] - answer.begun for answer in answers),
        "between_tokens_ms": 1e3 * statistics.median(gaps),
        "between_tokens_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)),
    }


def by_server(contest: Contest, port: int, clients: Any) -> Callable[[list[Prompts]], dict[str, float]]:
    def run(rounds: list[Prompts]) -> dict[str, float]:
        before = metrics(port)["trt_nvfp4_steps_total"]
        given = [(port, prompts, contest.new) for prompts in zip(*rounds, strict=True)]
        answers = [answer for found in clients.starmap(one_after_another, given, chunksize=1) for answer in found]
        return {**of_answers(answers), "steps": metrics(port)["trt_nvfp4_steps_total"] - before}

    return run


def by_scheduler(contest: Contest, model: Path, runner: Any, slots: int, stack: ExitStack) -> Any:
    queue, answers = FairQueue(slots), dict[Request, Answer]()

    def deliver(told: list[Told]) -> None:
        now = time.perf_counter()
        for request, event in told:
            if isinstance(event, Generated):
                answers[request].tokens.append(now)

    scheduler = Scheduler(opened(model, stack, runner=runner)[0], slots, queue, deliver)
    scheduler.warm_up()

    def run(rounds: list[Prompts]) -> dict[str, float]:
        before = scheduler.statistics.steps
        answers.clear()
        for prompts in rounds:
            requests = [Request(prompt, contest.new) for prompt in prompts]
            answers.update({request: Answer(time.perf_counter(), []) for request in requests})
            queue.put(*requests)
            while scheduler.step():
                pass
        return {**of_answers(list(answers.values())), "steps": float(scheduler.statistics.steps - before)}

    return run


def by_generate(contest: Contest, generator: Generator) -> Callable[[list[Prompts]], dict[str, float]]:
    def run(rounds: list[Prompts]) -> dict[str, float]:
        found = [generator.generate(prompts, max_new_tokens=contest.new, stop=()).timings for prompts in rounds]
        rate = statistics.median(timings.tokens_per_s or 0.0 for timings in found)
        return {
            "first_token_ms": 1e3 * statistics.median(timings.first_token_s for timings in found),
            "between_tokens_ms": 1e3 * len(rounds[0]) / rate,
        }

    return run


def beside(contest: Contest, port: int, clients: Any) -> dict[str, Any]:
    """A request that comes beside `RUNNING` others, in milliseconds, and what the others see meanwhile."""
    short = contest.capacity // 16
    rounds = contest.prompts(RUNNING, short)
    running = clients.starmap_async(streamed, [(port, p, contest.capacity - 2 * short) for p in rounds], chunksize=1)
    came = []
    while not running.ready():
        came.append(streamed(port, *contest.prompts(1), 1))
        time.sleep(0.02)
    answers = running.get()
    begin, end = (pick(a.tokens[at] for a in answers) for pick, at in ((max, 0), (min, -1)))
    seen = [answer for answer in came if begin < answer.begun and answer.tokens[0] < end]
    spans = [(answer.begun, answer.tokens[0]) for answer in seen]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for answer in answers:
        for before, after in zip(answer.tokens, answer.tokens[1:], strict=False):
            gaps[any(first < after and before < last for first, last in spans)].append(after - before)
    alone = streamed(port, *contest.prompts(1), 1)
    times = [1e3 * (last - first) for first, last in spans]
    found = {
        "running": RUNNING,
        "came": len(seen),
        "first_token_ms": statistics.median(times),
        "range_first_token_ms": [min(times), max(times)],
        "first_token_alone_ms": 1e3 * (alone.tokens[0] - alone.begun),
        "between_tokens_of_others_ms": {
            name: {"median": 1e3 * statistics.median(gaps[key]), "p99": 1e3 * float(np.quantile(gaps[key], 0.99))}
            for name, key in (("before and behind", False), ("meanwhile", True))
        },
    }
    print(found)
    return found


def model_of(given: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """The model's file and its tokenizer's folder."""
    if given.model is not None:
        return given.model, given.tokenizer
    from benchmarks.models import generate

    folder = folder / f"layers_{given.layers}"
    if not (folder / generate.QUANTIZED).is_file():
        generate.exported(folder, given.target, max(given.clients), given.layers)
    tokenizer = folder / "words"
    return folder / generate.QUANTIZED, tokenizer if tokenizer.is_dir() else words(
        tokenizer, generate.SHAPE["vocab_size"]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=6, help="requests of each client")
    parser.add_argument("--layers", type=int, default=28, help="of the model; Qwen3-0.6B has 28")
    parser.add_argument("--target", default="h200", help="what the plan is made for")
    parser.add_argument("--models", type=Path, help="folder for the ONNX models (default: a scratch folder)")
    parser.add_argument("--export-only", action="store_true", help="make them and measure nothing")
    parser.add_argument("--model", type=Path, help="serve this one instead")
    parser.add_argument("--tokenizer", type=Path, help="the folder of its tokenizer")
    parser.add_argument("--runner", default="torch")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "serving.json")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        # Forked before anything runs on the GPU; each has an interpreter, so that clients do not wait for each other.
        clients = stack.enter_context(multiprocessing.get_context("fork").Pool(max(*given.clients, RUNNING)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, tokenizer = model_of(given, given.models or folder)
        if not given.export_only:
            measure(given, model, tokenizer, clients, stack, folder)


def measure(
    given: argparse.Namespace, model: Path, tokenizer: Path, clients: Any, stack: ExitStack, folder: Path
) -> None:
    """Every contestant with every number of clients; the record is written after each."""
    options = ("--tokenizer", tokenizer, "--runner", given.runner, "--draft", "none", "--slots")
    generator = stack.enter_context(Generator(model, tokenizer, runner=given.runner, draft="none"))
    contest = Contest(generator.decoder.capacity, generator.decoder.vocab_size, given.rounds)
    result: dict[str, Any] = {
        "environment": environment()
        if torch.cuda.is_available()
        else {"torch": torch.__version__, "command": command()},
        "model": str(given.model or f"Qwen3-0.6B's shape with {given.layers} layers"),
        "prompt_tokens": contest.prompt,
        "new_tokens": contest.new,
        "rounds": contest.rounds,
        "capacity": contest.capacity,
        "runs": [],
    }
    for count in given.clients:
        with ExitStack() as each:
            server = each.enter_context(served(model, folder / "log", *options, count))
            contestants = {
                "server": by_server(contest, server.port, clients),
                "scheduler": by_scheduler(contest, model, given.runner, count, each),
                "generate": by_generate(contest, generator),
            }
            for name, run in contestants.items():
                result["runs"].append(contest.measured(name, count, run))
                record(given.out, result)
            if count == RUNNING + 1:
                result["beside"] = beside(contest, server.port, clients)
                record(given.out, result)


if __name__ == "__main__":
    main()
