"""Takes the steps of the acceptance run, each in a process with a time limit; a second run goes on after the first."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.cuda.driver import local_driver
from trt_nvfp4.builder.doctor.acceptance.steps import Need, Outcome, State, Step, steps
from trt_nvfp4.builder.doctor.check import Check
from trt_nvfp4.builder.doctor.machine import checks
from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.builder.targets import TARGETS, Target, arch_of
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import replacing

RESULT = "acceptance.json"
WORKER = (sys.executable, "-m", "trt_nvfp4.builder.doctor.acceptance.work")
#: Lines of a failed step's log that its outcome shows.
_LINES = 5


def target_here() -> Target:
    """The target of the GPU in this machine. Raises BuilderError (unavailable) without one."""
    driver = local_driver()
    here = driver.gpus[0].compute_capability if driver is not None and driver.gpus else None
    for target in TARGETS.values():
        if target.compute_capability == here:
            return target
    raise UnavailableError(
        f"this machine has {'no NVIDIA GPU' if here is None else f'a GPU that no target names: {arch_of(here)}'}; "
        "--target NAME takes the steps that need none",
    )


def accept(
    folder: Path,
    target: Target,
    show: Callable[[Outcome], None],
    worker: Sequence[str] = WORKER,
    chosen: Sequence[Step] | None = None,
) -> list[Outcome]:
    """Take all steps, or those `chosen`; returns their outcomes, which `folder`/acceptance.json holds too.

    A step that passed before on the same machine, versions and target is not taken again. `show` sees each outcome.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = list(checks())
    lacking = _lacking(machine, target)
    found: dict[str, Outcome] = {}
    before = _before(folder, _fingerprint(machine, target))
    for step in steps("tensorrt" not in lacking) if chosen is None else chosen:
        needs = [lacking[need] for need in step.needs if need in lacking]
        earlier = found.get(step.after.key) if step.after is not None else None
        if needs:
            outcome = _outcome(step, "skipped", needs[0])
        elif earlier is not None and earlier.state != "passed":
            outcome = _outcome(step, "skipped", f"{earlier.title}: {earlier.state}")
        elif step.key in before:
            outcome = before[step.key]
        else:
            outcome = _take(step, folder, target, worker)
        found[step.key] = outcome
        show(outcome)
        _write(folder, machine, target, found)
    return list(found.values())


def _lacking(machine: Sequence[Check], target: Target) -> Mapping[Need, str]:
    """Requirements of steps that this machine lacks, each with its fix."""
    of = {check.name: check for check in machine}

    def reason(name: str) -> str:
        return f"{of[name].found}; {of[name].fix}"

    lacking: dict[Need, str] = {}
    if of["GPU"].state != "ok":
        lacking["gpu"] = reason("GPU")
    if of["nvcc"].state != "ok" and "packaged kernels" not in of:
        lacking["compiler"] = reason("nvcc")
    if (why := target.unsupported_here()) is not None:
        lacking["tensorrt"] = why
    if of["Hugging Face models"].state != "ok":
        lacking["hf"] = reason("Hugging Face models")
    return lacking


def _take(step: Step, folder: Path, target: Target, worker: Sequence[str]) -> Outcome:
    """Run the step's process; a crash or a hang is an outcome, too."""
    result, log = folder / f"{step.key}.json", folder / f"{step.key}.log"
    result.unlink(missing_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*worker, step.key, str(folder), target.name], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            return _outcome(step, "timed out", f"it did not end within {step.limit} s; its log is {log.name}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0 and (outcome := _read(result)) is not None:
        return outcome
    ending = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    last = " | ".join(log.read_text(errors="replace").splitlines()[-_LINES:])
    return _outcome(step, "crashed", f"its process {ending}: {last}")


def _outcome(step: Step, state: State, detail: str) -> Outcome:
    return Outcome(step.variant.name, step.title, state, detail)


def _read(file: Path) -> Outcome | None:
    try:
        return Outcome(**read_json(file))
    except (OSError, ValueError, TypeError):
        return None


def _before(folder: Path, fingerprint: str) -> dict[str, Outcome]:
    """Steps that passed in an earlier run on the same machine, versions and target."""
    try:
        told = read_json(folder / RESULT)
        if told["fingerprint"] != fingerprint:
            return {}
        outcomes = {key: Outcome(**outcome) for key, outcome in told["steps"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {key: outcome for key, outcome in outcomes.items() if outcome.state == "passed"}


def _fingerprint(machine: Sequence[Check], target: Target) -> str:
    """GPU, versions and target; free space and memory change by themselves."""
    said = [check.found for check in machine if check.name in ("Python", "GPU", "TensorRT", "nvcc", "CUTLASS")]
    return hashlib.sha256("\0".join([target.name, *said]).encode()).hexdigest()


def _write(folder: Path, machine: Sequence[Check], target: Target, found: Mapping[str, Outcome]) -> None:
    """The result so far, without names of users or folders."""
    home = str(Path.home())
    content: dict[str, Any] = {
        "kind": "acceptance",
        "target": target.name,
        "fingerprint": _fingerprint(machine, target),
        "machine": [asdict(check) for check in machine],
        "steps": {key: asdict(outcome) for key, outcome in found.items()},
    }
    text = json.dumps(content, indent=2).replace(json.dumps(str(folder.absolute()))[1:-1], ".")
    with replacing(folder / RESULT) as temporary:
        temporary.write_text(text.replace(json.dumps(home)[1:-1], "~") + "\n")
