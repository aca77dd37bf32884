"""Fuzzing of what commands read besides models: plans, reports, bundles, statistics, samples, adapters, tokenizers,
quantized directories of each format, shards, engines. `--only TEXT` takes the kinds whose names hold it.

    python tests/fuzz/file_driver.py --seconds 600 --seed 7

None may end with exit code 1, hang, take much memory, flood the terminal, or leave anything outside its folder. File N
of a seed is always the same one.
"""

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.driver import DEFECT, HANGS, LARGE, Outcome, ending, limit_memory
from fuzz.files import KINDS, write

from trt_nvfp4.builder import errors

SECONDS_PER_FILE = 20
# Characters of a message that a terminal takes.
LONGEST_MESSAGE = 4000
NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 1 << 70, 0.5, float("inf"), float("nan"), "", "x", [], {}, [[]], [None], {"": {}}),
    *(
        "../../outside",
        "/etc/hostname",
        "/dev/zero",
        "a\0b",
        "\x1b]0;owned\x07",
        "\u202egnp",
        "y" * 100_000,
        "9" * 5000,
    ),
    *(
        "(a+)+$",
        "a{99999999999}",
        "nvfp4_w4a4",
        "fp8",
        "keep",
        "nan",
        "\ud800",
        ["x"] * 3,
        {"x": "y"},
        1e308,
        [1, 2, 3],
    ),
)


def _nasty(random_: random.Random) -> Any:
    return copy.deepcopy(random_.choice(NASTY))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value within."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _changed_value(value: Any, random_: random.Random) -> Any:
    for _ in range(random_.choice((1, 1, 2, 4))):
        places = list(_places(value))
        if not places or random_.random() < 0.03:
            return _nasty(random_)
        container, key = random_.choice(places)
        what = random_.randrange(5)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[random_.choice([str(nasty) for nasty in NASTY])] = container[key]
        elif what == 2 and isinstance(container, list):
            container.insert(key, _nasty(random_))
        elif what == 3:
            other, where = random_.choice(places)
            container[key] = json.loads(json.dumps(other[where], default=str))
        else:
            container[key] = _nasty(random_)
    return value


def _changed_bytes(data: bytes, random_: random.Random) -> bytes:
    what, at = random_.randrange(6), random_.randrange(len(data) + 1)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + random_.randbytes(random_.randint(1, 16)) + data[at:]
    if what == 2:
        return random_.choice((b"", b"\xff\xfe\0", b"[" * 100_000, b"{" * 100_000, b"PK\3\4" + data, data * 2))
    flipped = bytearray(data)
    for _ in range(random_.choice((1, 1, 3, 10))):
        flipped[random_.randrange(len(flipped))] = random_.randrange(256)
    return bytes(flipped)


def _with_header(data: bytes, random_: random.Random) -> bytes:
    """Safetensors with another header."""
    length = struct.unpack("<Q", data[:8])[0]
    header = _dumped(_changed_value(json.loads(data[8 : 8 + length]), random_)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _dumped(value: Any) -> str:
    # Nesting that Python's own writer cannot write does not come up.
    return json.dumps(value, ensure_ascii=False)


def _lines(text: str, random_: random.Random) -> str:
    lines = text.splitlines()
    at = random_.randrange(len(lines))
    lines[at] = _dumped(_changed_value(json.loads(lines[at]), random_))
    return "\n".join(lines)


def changed_file(file: Path, data: bytes, random_: random.Random) -> bytes:
    if random_.random() < 0.25:
        return _changed_bytes(data, random_)
    writers: dict[str, Callable[[], str]] = {
        ".json": lambda: _dumped(_changed_value(json.loads(data), random_)),
        ".jsonl": lambda: _lines(data.decode(), random_),
        ".yaml": lambda: yaml.dump(_changed_value(yaml.safe_load(data), random_), width=100_000),
    }
    if file.suffix == ".safetensors":
        return _with_header(data, random_)
    if file.suffix not in writers:
        return _changed_bytes(data, random_)
    return writers[file.suffix]().encode("utf-8", "surrogatepass")


def _hangs(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(HANGS)


def _outside(folder: Path) -> set[str]:
    """What lies beside the folder, and in it but for what runs write."""
    written = ("again.", "bundle", "o.", ".")
    return {p.name for p in folder.parent.iterdir()} | {
        p.name for p in folder.iterdir() if not p.name.startswith(written)
    }


def attack(seed: int, seconds: float, count: int, folder: Path, only: str = "") -> Outcome:
    """Read changed files 0, 1, ... of `seed` in `folder` until the time or the `count` is up."""
    outcome, names = Outcome(), [name for name in KINDS if only in name]
    (own := folder / "own").mkdir()
    with _quiet():
        write(own)
    before, data = _outside(own), {name: (own / kind.file).read_bytes() for name, kind in KINDS.items()}
    started, number = time.monotonic(), 0
    signal.signal(signal.SIGALRM, _hangs)
    while number < count and time.monotonic() - started < seconds:
        random_ = random.Random(f"{seed} {number}")
        name = names[number % len(names)]
        file = own / KINDS[name].file
        file.write_bytes(changed_file(file, data[name], random_))
        signal.alarm(SECONDS_PER_FILE)
        how, details = "exit code 0", ""
        try:
            with _quiet():
                KINDS[name].read(own)
        except BaseException as error:  # Rust's panics are no Exception
            signal.alarm(0)
            how, details = _how(error)
        signal.alarm(0)
        file.write_bytes(data[name])
        if _outside(own) != before:
            how, details = DEFECT, f"left {_outside(own) ^ before}"
            before = _outside(own)
        outcome.counts[how] += 1
        if details:
            outcome.failures.append((number, how, f"{name}: {details}"))
        number += 1
    return outcome


def _how(error: BaseException) -> tuple[str, str]:
    """How a command would end, and what is wrong with the failure, if anything."""
    if isinstance(error, TimeoutError) and str(error) == HANGS:
        return HANGS, traceback.format_exc()
    how = ending(error)
    if how in (DEFECT, LARGE) or isinstance(error, KeyboardInterrupt):
        return how, traceback.format_exc()
    text = errors.printable(errors.message(error))
    if len(text) > LONGEST_MESSAGE:
        return DEFECT, f"a message of {len(text)} characters: {text[:200]}"
    if re.search("[\x00-\x08\x0b-\x1f\x7f]", text):
        return DEFECT, f"raw control characters: {text!r}"
    return how, ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="stop after this many files")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds whose names hold this")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    limit_memory()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        outcome = attack(arguments.seed, arguments.seconds, arguments.count, Path(folder), arguments.only)
        shutil.rmtree(folder, ignore_errors=True)
    kinds: dict[str, tuple[int, str]] = {}
    for number, how, details in outcome.failures:
        last = f"{how} {details.split(':', 1)[0]}: {details.strip().splitlines()[-1][:160]}"
        kinds.setdefault(last, (number, details))
    for last, (number, details) in kinds.items():
        print(f"file {number} of seed {arguments.seed}: {last}\n{details[-1500:]}\n")
    for last, found in Counter(
        f"{how} {details.split(':', 1)[0]}: {details.strip().splitlines()[-1][:160]}"
        for _, how, details in outcome.failures
    ).most_common():
        print(f"{found:6} {last}")
    listed = ", ".join(f"{found} {how}" for how, found in sorted(outcome.counts.items()))
    print(f"seed {arguments.seed}: {outcome.counts.total()} files: {listed}")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
