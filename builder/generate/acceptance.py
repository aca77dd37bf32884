"""The acceptance run of a bundle, as its accept.py: the engine is built, run on recorded text, and compared with
recorded logits.

Needs TensorRT's (or TensorRT-RTX's) package, NumPy and cuda-bindings, and nothing of this project but the bundle.

Exit codes: 0 accepted, 5 a step failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.common.json_text import read_npz
from trt_nvfp4.common.replacing import replacing

from ..errors import (
    INTERRUPTED,
    VERIFICATION_FAILED,
    ModelFaultError,
    UsageError,
    VerificationError,
    exit_code,
    message,
    printable,
)
from ..records.bundle import ACCEPT_SCRIPT, MANIFEST, REFERENCE
from .generator import Generator
from .loop import advance, prefill
from .open import open_runner
from .runner import Runner
from .script import engine_of

RESULT = "acceptance.json"
#: Tokens of the prompts, and how many follow.
PROMPTS, STEPS = (3, 11), 8
LARGEST_KL, LEAST_EQUAL = 0.01, 0.9
#: Seconds after which a step is ended.
LIMITS = {"build": 3600, "compare": 600, "speed": 600}


def record(runner: Runner, file: Path) -> None:
    """Write two random prompts, the likeliest tokens behind them by `runner`, and its logits in float16, [steps,
    prompts, vocabulary]. Raises UsageError for caches that are too short."""
    decoder = runner.decoder
    if decoder.capacity < max(PROMPTS) + STEPS:
        raise UsageError(f"{runner.name}: caches of {decoder.capacity} tokens are too short for an acceptance run")
    rng = np.random.default_rng(0)
    count = min(len(PROMPTS), decoder.max_batch)
    rows = [rng.integers(0, decoder.vocab_size, length).tolist() for length in PROMPTS[:count]]
    logits = _logits(runner, rows, lambda step, found: found.argmax(-1).tolist())
    ids = np.array([[*row, *[-1] * (max(map(len, rows)) - len(row))] for row in rows])
    np.savez(file, ids=ids, logits=logits.astype(np.float16))


def compare(runner: Runner, file: Path) -> dict[str, float]:
    """How `runner` agrees with what `record` wrote: mean KL divergence in nats and share of equal likeliest tokens.
    Raises VerificationError beyond the limits."""
    try:
        recorded = read_npz(file)
        ids, expected = recorded["ids"], recorded["logits"].astype(np.float64)
        texts = [[int(token) for token in row if token >= 0] for row in ids]
    except (OSError, ValueError, KeyError) as error:
        raise ModelFaultError(f"{file}: not a recorded reference ({error}); copy the bundle again") from error
    count = expected.shape[1]
    rows = [text[: len(text) - STEPS + 1] for text in texts[:count]]
    found = _logits(runner, rows, lambda step, _: [text[len(row)] for text, row in zip(texts, rows, strict=True)])
    if found.shape != expected.shape or not np.isfinite(found).all():
        raise VerificationError(f"{runner.name}: its logits hold NaN or Inf, or have the shape {list(found.shape)}")
    p, q = _log_softmax(expected), _log_softmax(found.astype(np.float64))
    agreement = {
        "kl": round(float((np.exp(p) * (p - q)).sum(-1).mean()), 6),
        "equal_tokens": round(float((p.argmax(-1) == q.argmax(-1)).mean()), 4),
    }
    if agreement["kl"] > LARGEST_KL or agreement["equal_tokens"] < LEAST_EQUAL:
        raise VerificationError(
            f"{runner.name}: KL {agreement['kl']} and {agreement['equal_tokens']:.0%} equal tokens against ONNX "
            f"Runtime, expected at most {LARGEST_KL} and at least {LEAST_EQUAL:.0%}"
        )
    return agreement


def main(folder: Path) -> int:
    """Take the steps, each in a process of its own; returns the exit code. `folder`/acceptance.json is the result."""
    parser = argparse.ArgumentParser(description="Build, run and check the engine of this bundle on this device.")
    parser.add_argument("--step", choices=[*LIMITS], help=argparse.SUPPRESS)
    if (step := parser.parse_args().step) is not None:
        return _in_process(folder, step)
    outcomes: dict[str, dict[str, Any]] = {}
    try:
        for name, limit in LIMITS.items():
            outcomes[name] = _take(folder, name, limit)
            found = outcomes[name]["found"]
            shown = found if isinstance(found, str) else json.dumps(found)
            print(f"{outcomes[name]['state']:9} {name}: {shown}", flush=True)
            if outcomes[name]["state"] != "passed":
                break
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.release()}
    with replacing(folder / RESULT) as temporary:
        temporary.write_text(json.dumps({"kind": "acceptance", **machine, "steps": outcomes}, indent=2) + "\n")
    print(f"{folder / RESULT}: attach it to a report")
    return 0 if all(outcome["state"] == "passed" for outcome in outcomes.values()) else VERIFICATION_FAILED


def _take(folder: Path, name: str, limit: int) -> dict[str, Any]:
    command = [str(folder / "build_engine.py")] if name == "build" else [str(folder / ACCEPT_SCRIPT), "--step", name]
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"state": "timed out", "seconds": limit, "found": f"it did not end within {limit} s"}
    seconds = round(time.monotonic() - started, 1)
    if ended.returncode != 0:
        state = "failed" if ended.returncode > 0 else "crashed"
        found = ended.stderr[-1000:].strip().removeprefix("error: ")
        return {"state": state, "seconds": seconds, "found": printable(found)}
    last = ended.stdout.strip().splitlines()[-1:]
    return {"state": "passed", "seconds": seconds, "found": last[0] if name == "build" else json.loads(last[0])}


def _in_process(folder: Path, step: str) -> int:
    try:
        engine = engine_of(folder)
        if step == "compare":
            runner = open_runner(engine, folder / MANIFEST)
            try:
                print(json.dumps(compare(runner, folder / REFERENCE)))
            finally:
                runner.close()
        else:
            with Generator(engine, manifest=folder / MANIFEST, draft="none") as generator:
                timings = generator.generate([[1, 2, 3]], max_new_tokens=STEPS).timings
            print(json.dumps({"first_token_s": timings.first_token_s, "tokens_per_s": timings.tokens_per_s}))
        return 0
    except Exception as error:
        if (code := exit_code(error)) is None:
            raise
        print(f"error: {printable(message(error))}", file=sys.stderr)
        return code


def _logits(runner: Runner, rows: list[list[int]], following: Callable[[int, np.ndarray], Sequence[int]]) -> np.ndarray:
    """Logits [steps, rows, vocabulary] behind the rows and behind the tokens that `following` gives, which it sees the
    logits for; these are added to the rows."""
    runner.start(len(rows))
    found = [prefill(runner, rows).host()]
    for step in range(1, STEPS):
        for row, token in zip(rows, following(step, found[-1]), strict=True):
            row.append(token)
        found.append(advance(runner, rows, range(len(rows))).host())
    return np.stack(found)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
