"""Breaks a kernel in one place at a time and says what its tests do not notice.

A pytest plugin: every test that runs on an emulated GPU is repeated with mutations of the kernels that it launched.

    PYTHONPATH=tests:tests/plugins pytest -p ptx_emulator.mutate --mutations 200 --mutate W4A4Kernel \\
        --survivors survivors.json tests/plugins/test_emulated_long_k.py -k gated

Instructions that the test executes are drawn at random, and for each a rule that applies:

- drop: the instruction is not there;
- flip: its guard, its comparison or its operation is the opposite one;
- shift: a constant is one more, an address one word further;
- swap: two of its sources change places.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .codegen import Compiler
from .ir import Address, Immediate, Instruction, Operand, Register, Vector
from .launch import LoadedModule
from .program import Program
from .special import special_register

_OPPOSITES = (
    ("lt", "ge"), ("le", "gt"), ("eq", "ne"), ("lo", "hs"), ("ls", "hi"), ("add", "sub"), ("and", "or"),
    ("min", "max"), ("shl", "shr"), ("inc", "dec"),
)  # fmt: skip
_FLIPPED = {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}
_ENDS = ("bra", "brx", "ret", "exit", "trap")
_COMMUTES = ("add", "mul", "min", "max", "and", "or", "xor", "fma", "mad", "st", "call")
_WORD = 4


@dataclass(frozen=True)
class Mutation:
    kernel: str
    line: int
    rule: str
    before: str
    after: str | None
    block: int
    index: int


def _shifted(operand: Operand) -> Operand | None:
    if isinstance(operand, Immediate) and isinstance(operand.value, int):
        return replace(operand, value=operand.value + 1)
    if isinstance(operand, Address):
        return replace(operand, offset=operand.offset + _WORD)
    return None


def variants(item: Instruction) -> Iterator[tuple[str, Instruction | None]]:
    """(rule, what stands in the instruction's place)."""
    if item.name not in _ENDS:
        yield "drop", None
    if item.guard is not None:
        yield "flip", replace(item, guard_negated=not item.guard_negated)
    for position, part in enumerate(item.opcode):
        if part in _FLIPPED and (position == 0 or item.name in ("setp", "set", "atom", "red", "setmaxnreg")):
            yield "flip", replace(item, opcode=(*item.opcode[:position], _FLIPPED[part], *item.opcode[position + 1 :]))
    operands = item.operands
    for position, operand in enumerate(operands):
        if (other := _shifted(operand)) is not None:
            yield "shift", replace(item, operands=(*operands[:position], other, *operands[position + 1 :]))
    if item.name not in _COMMUTES:
        for first in range(1, len(operands) - 1):
            a, b = operands[first], operands[first + 1]
            same = isinstance(a, Register) and isinstance(b, Register) and a.bits == b.bits
            if a != b and (same or (isinstance(a, Vector) and isinstance(b, Vector))):
                yield "swap", replace(item, operands=(*operands[:first], b, a, *operands[first + 2 :]))


def draw(program: Program, executed: list[int], count: int, seed: int) -> list[tuple[Mutation, Instruction | None]]:
    """`count` mutations of instructions in blocks that were executed, no two alike."""
    places = [(b, i) for b, times in enumerate(executed) if times for i in range(len(program.blocks[b].instructions))]
    choice = random.Random(seed)
    choice.shuffle(places)
    found = []
    for block, index in places:
        item = program.blocks[block].instructions[index]
        options = list(variants(item))
        if options:
            rule, other = choice.choice(options)
            after = None if other is None else _text(other)
            found.append((Mutation(program.name, item.line, rule, item.text, after, block, index), other))
    return found[:count]


def _text(item: Instruction) -> str:
    guard = f"@{'!' if item.guard_negated else ''}{item.guard} " if item.guard is not None else ""
    return f"{guard}{'.'.join(item.opcode)} {item.operands}"


def apply(module: LoadedModule, mutation: Mutation, other: Instruction | None) -> None:
    """From now on the module's kernel has the mutation."""
    program, _ = module.program(mutation.kernel)
    blocks = list(program.blocks)
    instructions = list(blocks[mutation.block].instructions)
    instructions[mutation.index : mutation.index + 1] = [] if other is None else [other]
    blocks[mutation.block] = replace(blocks[mutation.block], instructions=instructions)
    mutated = replace(program, blocks=blocks)
    module.replace(mutation.kernel, mutated, Compiler(mutated, module, special_register))


# -- the plugin -----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutations of kernels")
    group.addoption("--mutations", type=int, default=0, help="how many of each test's kernels together")
    group.addoption("--mutate", default="", help="kernels whose name holds this")
    group.addoption("--mutation-seed", type=int, default=0)
    group.addoption("--mutation-jobs", type=int, default=os.cpu_count())
    group.addoption("--survivors", type=Path, help="a JSON file of all mutations and what became of them")


def _run(item: pytest.Item, module: LoadedModule, mutation: Mutation, other: Instruction | None, limit: int) -> None:
    """In a process of its own, which ends with 0 where the test passes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    try:
        apply(module, mutation, other)
        item.runtest()
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    options = item.config.option
    gpu: Any = getattr(item, "funcargs", {}).get("emulated_gpu")
    if gpu is not None:
        gpu.launches.clear()
    start = time.monotonic()
    yield
    if gpu is None or not options.mutations:
        return
    limit = 60 + int(5 * (time.monotonic() - start))
    executed: dict[str, list[int]] = {}
    for launch in gpu.launches:
        if options.mutate in launch.kernel and launch.counters is not None:
            executed[launch.kernel] = launch.counters.block_executions
    todo = []
    for kernel, counts in executed.items():
        module = next(m for m in gpu.modules if kernel in m.entries)
        program, _ = module.program(kernel)
        share = -(-options.mutations // len(executed))
        todo += [(module, *mutation) for mutation in draw(program, counts, share, options.mutation_seed)]
    results = _all(item, todo, limit, options.mutation_jobs)
    survivors = [r for r in results if r["outcome"] == "survived"]
    print(f"\n{item.name}: {len(results)} mutations, {len(survivors)} survived")
    for survivor in survivors:
        print(f"  {survivor['rule']} line {survivor['line']}: {survivor['before']} -> {survivor['after']}")
    if options.survivors is not None:
        known = json.loads(options.survivors.read_text()) if options.survivors.exists() else []
        options.survivors.write_text(json.dumps([*known, *({"test": item.name, **r} for r in results)], indent=1))


def _all(item: pytest.Item, todo: list[Any], limit: int, jobs: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    running: list[tuple[Any, Mutation]] = []
    results: list[dict[str, Any]] = []
    waiting = todo[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            module, mutation, other = waiting.pop()
            process = context.Process(target=_run, args=(item, module, mutation, other, limit))
            process.start()
            running.append((process, mutation))
        for process, mutation in running:
            if process.exitcode is not None:
                outcome = {0: "survived", 1: "noticed"}.get(process.exitcode, "ran too long")
                results.append({**asdict(mutation), "outcome": outcome})
        running = [(p, m) for p, m in running if p.exitcode is None]
        time.sleep(0.05)
    return results
