"""Breaks kernels on purpose and says what the tests that run them do not notice.

A pytest plugin. It runs the tests that it is given once and notes which kernels they launch and which of their
instructions run; then it draws mutations (see mutations.py) and repeats for each the tests that execute what it
breaks, the cheapest first, until one fails. A wrong result, a report of the checker, any other error, and several times
the CPU time of the kernel as it is all count as a failure.

    PYTHONPATH=tests:tests/plugins pytest -p ptx_emulator.mutate --mutations 200 --mutate W4A4Kernel \\
        --mutants mutants.jsonl tests/plugins/test_emulated_long_k.py -k gated
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import pytest
from _pytest.runner import runtestprotocol

from .codegen import Compiler
from .counters import Counters
from .coverage import Coverage
from .ir import Instruction
from .launch import Launch, LoadedModule
from .mutations import Mutation, Population, again, apply

# CPU seconds that a test of a mutant may take beyond this many times what it took with the kernel as it is.
_GRACE, _TIMES = 5, 3
_POLL = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutations of kernels")
    group.addoption("--mutations", type=int, default=0, help="how many, of all matching kernels together")
    group.addoption("--mutate", default="", help="kernels whose name this regular expression finds")
    group.addoption("--mutation-seed", type=int, default=0)
    group.addoption("--mutation-jobs", type=int, default=os.cpu_count())
    group.addoption("--mutation-seconds", type=float, default=float("inf"), help="draw no more after this time")
    group.addoption(
        "--mutants",
        type=Path,
        help="a file that gets one JSON line for each mutation; those that it has are not tried again",
    )
    group.addoption("--survivors", type=Path, help="such a file: try those that survived again, and draw none")


@dataclass
class Kernel:
    """One that matches: what of it ran, and of each test that launches it the seconds, and what of it that ran."""

    module: LoadedModule
    coverage: Coverage
    tests: dict[pytest.Item, tuple[float, Coverage]]

    def tests_of(self, block: int) -> list[pytest.Item]:
        """Those that execute the block, the cheapest first: no other can notice what it has instead."""
        found = [item for item, (_, coverage) in self.tests.items() if block in coverage.blocks()]
        if not found:
            raise pytest.UsageError(f"no test executes block {block}, in which a mutation is to be tried")
        return sorted(found, key=lambda item: self.tests[item][0])


class _Process(Protocol):
    """Of multiprocessing's fork context."""

    exitcode: int | None

    def kill(self) -> None: ...
    def join(self) -> None: ...


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.mutations and options.survivors is None:
        return None
    end = time.monotonic() + options.mutation_seconds
    options.tbstyle = "line"
    kernels = _observe(session.items, options.mutate, options.mutation_jobs)
    if not kernels:
        raise pytest.UsageError(f"these tests launch no kernel whose name matches {options.mutate!r}")
    todo: list[Any] = []
    seen: set[object] = set()
    for name, kernel in kernels.items():
        program, _ = kernel.module.program(name)
        if options.survivors is None:
            share = -(-options.mutations // len(kernels))
            population = Population(program, kernel.coverage)
            print("mutations in all, executed, not left out:", *population.counts(), name)
            todo += [(kernel, *mutation) for mutation in population.draw(share, options.mutation_seed, seen)]
        else:
            todo += [
                (kernel, m, again(program, m)) for m in _known(options.survivors, ("survived",)) if m.kernel == name
            ]
    random.Random(options.mutation_seed).shuffle(todo)  # what the time ends is a sample too
    drawn_before = options.survivors is None and options.mutants is not None and options.mutants.exists()
    known = set(_known(options.mutants)) if drawn_before else set()
    todo = [(kernel, m, other, kernel.tests_of(m.block)) for kernel, m, other in todo if m not in known]
    counts = {"killed": 0, "survived": 0}
    with open(options.mutants or os.devnull, "a") as lines:
        for result in _all(todo, options.mutation_jobs, end):
            counts[result["outcome"]] += 1
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            if result["outcome"] == "survived":
                print(f"  {result['rule']} line {result['line']}: {result['before']} -> {result['after']}")
    print(f"{sum(counts.values())} of {len(todo)} mutations, {counts['survived']} survived")
    return True


def _known(path: Path, outcomes: tuple[str, ...] = ("killed", "survived")) -> list[Mutation]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    names = [f.name for f in fields(Mutation)]
    return [Mutation(**{n: r[n] for n in names}) for r in results if r["outcome"] in outcomes]


def _observe(items: list[pytest.Item], pattern: str, jobs: int) -> dict[str, Kernel]:
    """The kernels that the tests launch, as they are. Each test runs in a process of its own; then the cheapest of each
    kernel runs in this one, so that mutants inherit what is parsed and compiled."""
    context = multiprocessing.get_context("fork")
    tests: dict[str, dict[pytest.Item, tuple[float, Coverage]]] = {}
    waiting, running = items[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(there, waiting[-1], pattern))
            process.start()
            there.close()
            running[here] = waiting.pop()
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            item = running.pop(connection)
            failed, seconds, covered = connection.recv()
            if failed:
                raise pytest.UsageError(f"{item.nodeid} fails with the kernel as it is: {failed}")
            for name, coverage in covered.items():
                tests.setdefault(name, {})[item] = seconds, coverage
    modules: dict[str, LoadedModule] = {}
    cheapest = list(dict.fromkeys(min(found, key=lambda item: found[item][0]) for found in tests.values()))
    with _launches(lambda launch, _: modules.setdefault(launch.program.name, launch.compiler.module)):
        for item, following in _with_next(cheapest):
            runtestprotocol(item, nextitem=following)
    kernels = {}
    for name, found in tests.items():
        covered = Coverage.of_all(coverage for _, coverage in found.values())
        kernels[name] = Kernel(modules[name], covered, found)
    return kernels


def _measure(to: Connection, item: pytest.Item, pattern: str) -> None:
    """In a process of its own: sends how the test failed, its CPU time, and what of the kernels ran."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    # Of each kernel, a coverage for every time that its module was loaded.
    loads: dict[str, list[Coverage]] = {}
    Compiler.covers = True

    def note(launch: Launch, _: Counters) -> None:
        name, coverage = launch.program.name, launch.compiler.coverage
        if coverage is not None and re.search(pattern, name) and coverage not in loads.setdefault(name, []):
            loads[name].append(coverage)

    start = time.process_time()
    with _launches(note):
        failed = [report for report in runtestprotocol(item, log=False, nextitem=None) if report.failed]
    covered = {name: Coverage.of_all(found) for name, found in loads.items()}
    to.send((failed[0].longreprtext if failed else "", time.process_time() - start, covered))
    to.close()
    os._exit(0)


@contextmanager
def _launches(note: Callable[[Launch, Counters], object]) -> Iterator[None]:
    """Every launch is noted once it is over."""
    run = Launch.run

    def noted(launch: Launch) -> Counters:
        counters = run(launch)
        note(launch, counters)
        return counters

    Launch.run = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.run = run  # type: ignore[method-assign]


def _with_next(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip_longest(items, items[1:])


def _run(
    to: Connection, kernel: Kernel, mutation: Mutation, other: Instruction | None, tests: list[pytest.Item]
) -> None:
    """In a process of its own: sends each test before it starts, and at last what noticed the mutation, or ""."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    apply(kernel.module, mutation, other)
    reason = ""
    for item, following in _with_next(tests):
        seconds, _ = kernel.tests[item]
        to.send(item.name)
        signal.setitimer(signal.ITIMER_PROF, _GRACE + _TIMES * seconds)  # SIGPROF ends the process
        failed = [report for report in runtestprotocol(item, log=False, nextitem=following) if report.failed]
        if failed:
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else failed[0].longreprtext
            break
    to.send(reason)
    to.close()
    os._exit(0)


def _all(todo: list[Any], jobs: int, end: float) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[_Process, Mutation, float, list[str]]] = {}
    waiting = todo[::-1]
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < jobs:
            kernel, mutation, other, tests = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(there, kernel, mutation, other, tests))
            process.start()
            there.close()
            running[here] = process, mutation, time.monotonic(), []
        for connection in wait(list(running), _POLL):
            assert isinstance(connection, Connection)
            process, mutation, start, said = running[connection]
            try:
                said.append(connection.recv())
                continue
            except EOFError:
                process.join()
            del running[connection]
            # Only who came to the end sent what noticed, or nothing.
            reason = said.pop() if process.exitcode == 0 else f"ends with {process.exitcode}, or runs too long"
            yield {
                **asdict(mutation),
                "outcome": "killed" if reason else "survived",
                "test": said[-1] if reason and said else None,
                "reason": reason[:300],
                "seconds": round(time.monotonic() - start, 1),
            }
    for process, *_ in running.values():
        process.kill()
