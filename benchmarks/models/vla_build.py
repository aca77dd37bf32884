"""A pi0.5-shaped policy at full size, from modules to bundles or engines: time, memory, and its parts' kernels.

    python -m benchmarks.models.vla_build [--targets thor rtx-blackwell] [--bundles thor] [--out FILE]

Runs `build-engine examples/vla/pi05.py:components` (random weights, 16 bits) for each target. Recorded are wall and CPU
seconds, the largest process, the most memory that all processes hold together, the bytes that are written, and what
examples/vla/predict.py shows of the parts. Needs no GPU. Other work on the machine is in the times.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.harness import HERE, command, record

VLA = HERE.parent / "examples" / "vla"
SECONDS_BETWEEN_LOOKS = 5.0


def run(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds and bytes of a command and its processes. Exits as it does where it fails."""
    begun, before, most = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        while process.poll() is None:
            most = max(most, memory_of(psutil.Process(process.pid)))
            time.sleep(SECONDS_BETWEEN_LOOKS)
    if process.returncode:
        raise SystemExit(process.returncode)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": time.perf_counter() - begun,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "largest_process_bytes": after.ru_maxrss * 1024,
        "all_processes_bytes": most,
    }


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process and those that it began; what they share, such as mapped weights, is counted once."""
    found = 0
    try:
        for each in (process, *process.children(recursive=True)):
            found += each.memory_full_info().pss
    except psutil.Error:  # it has just ended
        pass
    return found


def build(target: str, bundle: bool, folder: Path) -> dict[str, Any]:
    """The policy for one target, in `folder`, as a bundle or as engines."""
    sys.path.insert(0, str(VLA))
    import predict

    out = folder / target
    command = [
        str(Path(sys.executable).with_name("build-engine")),
        f"{VLA / 'pi05.py'}:components",
        "--target",
        target,
        "--set",
        "accuracy-samples=0",
    ]
    command += ["--bundle" if bundle else "-o", str(out)]
    spent = run(command, {"VLA_SIZE": "full", "VLA_DTYPE": "bfloat16"})
    Console(width=160).print(predict.table(out))
    report = json.loads((out / predict.REPORT).read_text())
    replaced = {
        name: sum(entry["decision"] != "keep" for entry in part["subgraphs"]) for name, part in report["parts"].items()
    }
    return {
        "target": target,
        "made": "bundle" if bundle else "engines",
        **spent,
        "written_bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        "parts": [{**asdict(row), "replaced": replaced[row.part]} for row in predict.rows_of(out)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["thor", "rtx-blackwell"])
    parser.add_argument(
        "--bundles", nargs="*", default=["thor"], help="targets for which a bundle is made, not engines"
    )
    parser.add_argument("--folder", type=Path, help="where to build (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "vla_build.json")
    given = parser.parse_args(arguments)
    runs = []
    for target in given.targets:
        # 10 GB, which the next target has no use for.
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            runs.append(build(target, target in given.bundles, Path(folder)))
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    record(
        given.out,
        {"command": command(), **machine, "runs": runs},
    )


if __name__ == "__main__":
    main()
