"""acceptance.html: the outcome of an acceptance run on one page."""

from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from trt_nvfp4.builder.doctor.acceptance.steps import Outcome
from trt_nvfp4.builder.doctor.check import Check
from trt_nvfp4.common.replacing import replacing

PAGE = "acceptance.html"


def write(folder: Path, target: str, machine: Sequence[Check], outcomes: Sequence[Outcome]) -> Path:
    """Write the page, which needs no other file and holds no script; returns its path."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(resources.files(__package__).joinpath("acceptance.html.jinja").read_text())
    variants = {name: list(steps) for name, steps in groupby(outcomes, lambda outcome: outcome.variant)}
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in ("passed", "skipped")}
    failed = sum(outcome.has_failed for outcome in outcomes)
    with replacing(folder / PAGE) as temporary:
        text = template.render(target=target, machine=machine, variants=variants, counts=counts, failed=failed)
        temporary.write_text(text)
    return folder / PAGE
