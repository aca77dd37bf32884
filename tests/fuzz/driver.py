"""Fuzzing of build-engine with changed models: none may end with exit code 1, end the process, hang or fill the memory.

    python tests/fuzz/driver.py --seconds 3600 --seed 7 --processes 8 --keep failures/

prints how many models of seeds 7 to 14 ended how, and the numbers that made the others; model N of a seed is always the
same one.
"""

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.models import models
from fuzz.mutations import mutate

# Of one model; the real ones take a fraction of a second.
SECONDS_PER_MODEL = 60
# Bytes beside what the program takes without a model.
MEMORY = 3 << 30
KINDS = ("moe", "mlp", "gated_mlp", "linear")
MODEL, FAILED = "m.onnx", ".failed.onnx"
# Every so many-th model is one that has been rewritten, from which a bundle is made.
REWRITTEN, REWRITTEN_EVERY = "rewritten", 5
DIED, HANGS, DEFECT, LARGE = "ended the process", "hangs", "exit code 1", "takes too much memory"


@dataclass
class Outcome:
    """How many models ended how, and what went wrong: (number, how, details)."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)


def changed_model(seed: int, number: int, originals: dict[str, onnx.ModelProto]) -> onnx.ModelProto:
    """Model `number` of `seed`; `originals` has one that has been rewritten, too."""
    random_ = random.Random(f"{seed} {number}")
    model = onnx.ModelProto()
    others = sorted(originals.keys() - {REWRITTEN})
    model.CopyFrom(originals[REWRITTEN if number % REWRITTEN_EVERY == 0 else random_.choice(others)])
    mutate(model, random_)
    return model


def rewritten_model(folder: Path) -> onnx.ModelProto:
    """One that `--stop-after rewrite` left in FP8, which needs no plugin library; `o.plan.yaml` is its plan."""
    from trt_nvfp4.builder.pipeline import pipeline
    from trt_nvfp4.builder.targets import TARGETS

    path = folder / "m.onnx"
    path.write_bytes(models()["plain"].SerializeToString())
    output = folder / "o.engine"
    pipeline.run(pipeline.Request(path, TARGETS["ada"], output, precision="fp8", stop_after="rewrite", kinds=KINDS))
    rewritten = onnx.load(folder / "o.rewritten.onnx")
    for tensor in rewritten.graph.initializer:
        tensor.data_location = onnx.TensorProto.DEFAULT
    return rewritten


def limit_memory() -> None:
    """Bounds what this process may take from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def ending(error: BaseException) -> str:
    """How a command ends that raised `error`."""
    from trt_nvfp4.builder import errors

    code = errors.exit_code(error)
    if code is None:
        return DEFECT
    return LARGE if "out of memory" in errors.message(error) else f"exit code {code}"


def fuzz(seed: int, seconds: float, count: int, folder: Path) -> Outcome:
    """Run models 0, 1, ... of `seed` until the time or the `count` is up, in processes that may die.

    Those that failed are left in `folder`, as `N.failed.onnx`.
    """
    outcome, start = Outcome(), 0
    deadline = time.monotonic() + seconds
    while start < count and time.monotonic() < deadline:
        arguments = ["--worker", str(start), "--seed", str(seed), "--count", str(count), "--folder", str(folder)]
        worker = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--seconds", str(deadline - time.monotonic())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert worker.stdout is not None
        begun = None
        for line in worker.stdout:
            entry = json.loads(line)
            begun = entry["number"]
            if "how" in entry:
                outcome.counts[entry["how"]] += 1
                if entry["how"] in (DEFECT, LARGE):
                    outcome.failures.append((begun, entry["how"], entry["details"]))
                start, begun = begun + 1, None
        status = worker.wait()
        if begun is not None:
            how = HANGS if status == -signal.SIGALRM else DIED
            outcome.counts[how] += 1
            outcome.failures.append((begun, how, f"status {status}"))
            shutil.copy(folder / MODEL, folder / f"{begun}{FAILED}")
            start = begun + 1
        elif status != 0:
            raise RuntimeError(f"the worker ended with {status}")
    return outcome


def work(seed: int, start: int, count: int, seconds: float, folder: Path) -> None:
    """Run models from `start` on in this process; each is announced, and then how it ended, on a line of JSON."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from trt_nvfp4.builder.pipeline import pipeline
    from trt_nvfp4.builder.report import inspection
    from trt_nvfp4.builder.targets import TARGETS

    originals, deadline = models(), time.monotonic() + seconds
    originals[REWRITTEN] = rewritten_model(folder)
    limit_memory()
    for number in range(start, count):
        if time.monotonic() > deadline:
            return
        print(json.dumps({"number": number}), file=report, flush=True)
        path, bundle = folder / MODEL, folder / "bundle"
        path.write_bytes(changed_model(seed, number, originals).SerializeToString())
        ada = partial(pipeline.Request, path, TARGETS["ada"])
        if number % REWRITTEN_EVERY == 0:
            request = ada(bundle=bundle, plan=folder / "o.plan.yaml")
        else:
            request = ada(folder / "o.engine", precision="nvfp4", stop_after="rewrite", kinds=KINDS)
        signal.alarm(SECONDS_PER_MODEL)
        how, details = "exit code 0", ""
        for run in (partial(inspection.inspect, path), partial(pipeline.run, request)):
            try:
                run()
            except Exception as error:
                how = ending(error)
                details = traceback.format_exc() if how in (DEFECT, LARGE) else ""
                if details:
                    shutil.copy(path, folder / f"{number}{FAILED}")
                    break
        signal.alarm(0)
        shutil.rmtree(bundle, ignore_errors=True)
        print(json.dumps({"number": number, "how": how, "details": details}), file=report, flush=True)


def run(seed: int, seconds: float, count: int, keep: Path | None) -> bool:
    """Fuzz one seed and print how it went; returns whether all was well."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(seed, seconds, count, Path(folder))
        for model in Path(folder).glob(f"*{FAILED}") if keep is not None else ():
            keep.mkdir(parents=True, exist_ok=True)
            shutil.move(model, keep / f"{seed}-{model.name}")
    lines = [f"model {number} of seed {seed}: {how}\n{details}" for number, how, details in outcome.failures]
    kinds = Counter(details.strip().splitlines()[-1][:160] for _, _, details in outcome.failures)
    lines += [f"{found:6} {kind}" for kind, found in kinds.most_common()]
    listed = ", ".join(f"{found} {how}" for how, found in sorted(outcome.counts.items()))
    print("\n".join([*lines, f"seed {seed}: {outcome.counts.total()} models: {listed}"]), flush=True)
    return not outcome.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="stop after this many models of a seed")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--processes", type=int, default=1, help="so many seeds, at once")
    parser.add_argument("--keep", type=Path, help="write the models that failed here")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.seed, arguments.worker, arguments.count, arguments.seconds, arguments.folder)
        return 0
    seeds = range(arguments.seed, arguments.seed + arguments.processes)
    with ThreadPoolExecutor(arguments.processes) as pool:  # each waits for a process
        well = list(pool.map(lambda seed: run(seed, arguments.seconds, arguments.count, arguments.keep), seeds))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
