"""doctor: what this machine has and lacks, and the acceptance run."""

# Without `from __future__ import annotations`: the types of options are read.

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs import field

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.doctor.machine import checks
from trt_nvfp4.builder.errors import UnavailableError, UsageError, VerificationError
from trt_nvfp4.builder.options import Options, described
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.terminal.output import output, status
from trt_nvfp4.builder.terminal.tables import grid

RUN = "Acceptance run"


@attrs.frozen
class DoctorOptions(Options):
    """The options of `doctor`."""

    GROUPS: ClassVar[tuple[str, ...]] = (RUN,)

    run: bool = field(
        default=False,
        kw_only=True,
        metadata=described(
            "Build, run and compare engines of every kind, about ten minutes. A second run goes on where the first "
            "stopped.",
            RUN,
        ),
    )
    target: str | None = field(
        default=None,
        kw_only=True,
        metadata=described("GPU to build for (default: the one in this machine).", RUN, metavar="NAME"),
    )
    output: Path = field(
        default=Path("acceptance"),
        converter=Path,
        kw_only=True,
        metadata=described(
            "Folder for acceptance.json, acceptance.html, models and logs.", RUN, metavar="DIR", short=("-o",)
        ),
    )


def doctor(given: dict[str, Any], as_json: bool) -> None:
    """Check this machine: GPU, driver, TensorRT, compilers, folders, packages, and which targets it can build for.

    Each line is ok, note (only some uses need it) or missing, with the command that fixes it. The exit code is 4 where
    something is missing, and 5 where a step of the acceptance run failed.
    """
    options = DoctorOptions(**given)
    if options.run:
        _accept(options, as_json)
        return
    if unused := sorted(given.keys() & {"target", "output"}):
        raise UsageError(f"--{unused[0]} is an option of the acceptance run: add --run, or leave it out")
    found = list(checks())
    if as_json:
        print_json(json.dumps({"kind": "doctor", "checks": [asdict(check) for check in found]}, indent=2))
    else:
        table = grid("This machine", ("check", "state", "found"))
        for check in found:
            before = "\n  " if output.is_terminal else "; "
            fix = f"{before}to fix: {check.fix}" if check.fix else ""
            table.add_row(check.name, check.state, check.found + fix)
        output.print(table)
    if missing := [check.name for check in found if check.state == "missing"]:
        raise UnavailableError(f"missing on this machine: {', '.join(missing)}")


def _accept(options: DoctorOptions, as_json: bool) -> None:
    from trt_nvfp4.builder.doctor.acceptance import page
    from trt_nvfp4.builder.doctor.acceptance.run import RESULT, accept, target_here
    from trt_nvfp4.builder.doctor.acceptance.steps import Outcome

    target = target_here() if options.target is None else find_target(options.target)

    def show(outcome: Outcome) -> None:
        line = f"{outcome.state:9} {outcome.variant}: {outcome.title}"
        status.print(f"{line}: {outcome.detail}" if outcome.detail else line, highlight=False)

    outcomes = accept(options.output, target, show)
    written = page.write(options.output, target.name, list(checks()), outcomes)
    if as_json:
        print_json((options.output / RESULT).read_text())
    else:
        output.print(f"{options.output / RESULT} and {written}: attach the first to a report", highlight=False)
    if failed := [f"{outcome.variant}: {outcome.title}" for outcome in outcomes if outcome.has_failed]:
        raise VerificationError(f"{len(failed)} steps failed: {'; '.join(failed)}; their logs lie in {options.output}")


app = Command("doctor", DoctorOptions, doctor)

if __name__ == "__main__":
    app()
