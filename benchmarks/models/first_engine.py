"""The first engine of a new user: from a fresh clone without any cache to the engines of both demos.

    python -m benchmarks.models.first_engine [REVISION ...] [--out FILE]

Clones this repository at each revision (default: HEAD) into a scratch folder, with empty caches of pip and kernels, and
runs both demos twice: from nothing, and with what the first run has cached. Recorded are wall and CPU seconds, those of
installing the packages, and the bytes of engines and compiled libraries. Needs the network; other work on the machine
is in the times.
"""

import argparse
import os
import platform
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, command, record

REPOSITORY = HERE.parent
DEMOS = ("demo", "demo-llm")


def timed(target: str, clone: Path, environment: dict[str, str]) -> dict[str, float]:
    """Wall and CPU seconds of `make target`. Raises CalledProcessError where it fails."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        ["make", target], cwd=clone, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.perf_counter() - begun, 1), "cpu_s": round(cpu, 1)}


def size_of(folder: Path, pattern: str) -> int:
    """Bytes of the files below `folder` that match; of those that are one file, once."""
    found = {os.stat(path).st_ino: os.stat(path).st_size for path in folder.rglob(pattern)}
    return sum(found.values())


def measure(revision: str, folder: Path) -> dict[str, Any]:
    """The demos of one revision, each from an empty kernel cache."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    subprocess.run(["git", "checkout", "--quiet", revision], cwd=clone, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=clone, text=True).strip()
    environment = {"PIP_CACHE_DIR": str(folder / "pip")}
    found: dict[str, Any] = {"commit": commit, "install": timed("install", clone, environment)}
    for demo in DEMOS:
        cache = folder / f"cache-{demo}"
        environment["TRT_NVFP4_CACHE"] = str(cache)
        empty, warm = timed(demo, clone, environment), timed(demo, clone, environment)
        engines = {path.name: path.stat().st_size for path in sorted((clone / "demo-output").rglob("*.engine"))}
        found[demo] = {"empty": empty, "warm": warm, "engines": engines, "libraries": size_of(cache, "*.so*")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["HEAD"], metavar="REVISION")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "first_engine.json")
    arguments = parser.parse_args()
    runs = []
    for revision in arguments.revisions:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(revision, Path(folder)))
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    record(arguments.out, {"environment": {"command": command(), **machine}, "runs": runs})


if __name__ == "__main__":
    main()
